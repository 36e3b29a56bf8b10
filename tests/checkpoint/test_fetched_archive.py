"""Archives: every member becomes a regular file inside the target, or nothing is unpacked."""

from __future__ import annotations

import io
import random
import tarfile
import zipfile
from pathlib import Path

import pytest
from loopback import tar

from delivery.checkpoint.fetch.archive import extract
from delivery.errors import DataError


def link(kind: bytes, target: str) -> object:
    def change(info: tarfile.TarInfo) -> None:
        if info.name.endswith("link"):
            info.type, info.linkname, info.size = kind, target, 0

    return change


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "..\\evil", "C:evil"])
def test_paths_that_leave(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar([(name, b"x")]))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"x")
    for kind in ("a.tar", "a.zip"):
        with pytest.raises(DataError, match="contains a path outside itself"):
            extract(tmp_path / kind, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("target", ["../../etc/passwd", "/etc/passwd"])
def test_links_that_leave(kind: bytes, target: str, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar([("ok", b"x"), ("sub/link", b"")], link(kind, target)))
    with pytest.raises(DataError, match="contains a path outside itself"):
        extract(tmp_path / "a.tar", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_inside_become_files(tmp_path: Path) -> None:
    members = [("blobs/x", b"data"), ("snapshots/main/link", b"")]
    (tmp_path / "a.tar").write_bytes(tar(members, link(tarfile.SYMTYPE, "../../blobs/x")))
    extract(tmp_path / "a.tar", tmp_path / "out")
    made = tmp_path / "out" / "snapshots" / "main" / "link"
    assert made.read_bytes() == b"data"
    assert not made.is_symlink()


def test_devices_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar([("link", b"")], link(tarfile.CHRTYPE, "")))
    with pytest.raises(DataError, match="which is not a regular file"):
        extract(tmp_path / "a.tar", tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x05\x06"])
def test_damaged(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(content)
    with pytest.raises(DataError, match="cannot be unpacked"):
        extract(tmp_path / "a.tar.gz", tmp_path / "out")


@pytest.mark.parametrize("kind", ["tar.gz", "tar.xz", "tar.bz2", "zip"])
def test_flipped_bytes_are_one_error(kind: str, tmp_path: Path) -> None:
    path, payload = tmp_path / f"a.{kind}", random.Random(0).randbytes(3000) + b"a" * 3000
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("config.json", payload)
    else:
        mode = kind.removeprefix("tar.")
        with tarfile.open(path, f"w:{mode}") as archive:  # type: ignore[call-overload]
            info = tarfile.TarInfo("config.json")
            info.size = len(payload)
            archive.addfile(info, io.BytesIO(payload))
    whole, draw, refused = path.read_bytes(), random.Random(1), 0
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            extract(path, tmp_path / "out")
        except DataError:
            refused += 1
    assert refused > 50


def test_links_in_a_circle(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, target in (("x", "y"), ("y", "x")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    with pytest.raises(DataError, match="cannot be unpacked"):
        extract(tmp_path / "a.tar", tmp_path / "out")
