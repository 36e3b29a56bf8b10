"""The archive: Helm's layout, and bytes that depend on the chart alone."""

from __future__ import annotations

import gzip
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from delivery.release.archive import write_chart_archive
from delivery.release.chart import ChartSpec, write_chart

Helm = Callable[..., subprocess.CompletedProcess[str]]


def test_same_chart_same_bytes(make_spec: Callable[..., ChartSpec], tmp_path: Path) -> None:
    first = write_chart(make_spec(), tmp_path / "a")
    second = write_chart(make_spec(), tmp_path / "b")
    for path in second.rglob("*"):
        os.utime(path, (1, 1))
    second.chmod(0o700)
    write_chart_archive(first, tmp_path / "a.tgz")
    write_chart_archive(second, tmp_path / "b.tgz")
    assert (tmp_path / "a.tgz").read_bytes() == (tmp_path / "b.tgz").read_bytes()


def test_a_changed_file_changes_the_archive(make_spec: Callable[..., ChartSpec], tmp_path: Path) -> None:
    chart = write_chart(make_spec(), tmp_path)
    write_chart_archive(chart, tmp_path / "a.tgz")
    (chart / "values.yaml").write_text("x: 1\n", "utf-8")
    write_chart_archive(chart, tmp_path / "b.tgz")
    assert (tmp_path / "a.tgz").read_bytes() != (tmp_path / "b.tgz").read_bytes()


def test_layout_is_that_of_helm_package(
    make_spec: Callable[..., ChartSpec], helm: Helm, tmp_path: Path
) -> None:
    chart = write_chart(make_spec(), tmp_path)
    write_chart_archive(chart, tmp_path / "ours.tgz")
    done = helm("package", chart, "--destination", tmp_path / "theirs")
    assert done.returncode == 0, done.stderr
    members = {}
    for name, path in (("ours", tmp_path / "ours.tgz"), ("theirs", tmp_path / "theirs" / "tiny-1.2.3.tgz")):
        with tarfile.open(path) as tar:
            members[name] = {m.name: (m.mode, m.type, m.size) for m in tar}
    # Helm writes Chart.yaml again, without its comments.
    assert members["ours"].keys() == members["theirs"].keys()
    chart_yaml = members["ours"].pop("tiny/Chart.yaml"), members["theirs"].pop("tiny/Chart.yaml")
    assert chart_yaml[0][:2] == chart_yaml[1][:2]
    assert members["ours"] == members["theirs"]


@pytest.mark.apt
@pytest.mark.slow
def test_a_registry_gives_back_the_same_bytes(
    make_spec: Callable[..., ChartSpec], helm: Helm, registry: str, tmp_path: Path
) -> None:
    archive = tmp_path / "tiny-1.2.3.tgz"
    write_chart_archive(write_chart(make_spec(), tmp_path), archive)
    done = helm("push", archive, f"oci://{registry}/charts", "--plain-http")
    assert done.returncode == 0, done.stderr
    (tmp_path / "pulled").mkdir()
    where = ["--version", "1.2.3", "--plain-http", "--destination", tmp_path / "pulled"]
    done = helm("pull", f"oci://{registry}/charts/tiny", *where)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pulled" / "tiny-1.2.3.tgz").read_bytes() == archive.read_bytes()


def test_long_contents_survive_the_stored_blocks(tmp_path: Path) -> None:
    chart = tmp_path / "big"
    chart.mkdir()
    content = os.urandom(200_000)
    (chart / "Chart.yaml").write_bytes(content)
    write_chart_archive(chart, tmp_path / "big.tgz")
    gzip.decompress((tmp_path / "big.tgz").read_bytes())
    with tarfile.open(tmp_path / "big.tgz") as tar:
        stream = tar.extractfile("big/Chart.yaml")
        assert stream is not None
        assert stream.read() == content
