"""The wheel works without the clone: what ships as data is in it and is found."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_PROGRAM = "import sys; from delivery.cli import main; sys.exit(main())"


@pytest.mark.slow
def test_the_wheel_works_outside_the_clone(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, "."]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = tmp_path.glob("deliver-*.whl")
    # As CI jobs install an unpublished build: a wheel in the repository, or one behind a URL.
    for requirement in (f"./{made.name}[demo]", f"deliver[demo] @ {made.as_uri()}"):
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--no-deps",
            "--no-index",
            requirement,
        ]
        done = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "Would install deliver-" in done.stdout
    with zipfile.ZipFile(made) as wheel:
        wheel.extractall(tmp_path / "site")
    work = tmp_path / "work"
    work.mkdir()
    # The clone is installed in this environment too; what comes first on the path is what counts.
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    def deliver(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _PROGRAM, *arguments]
        return subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, check=False)

    done = deliver("init", "--model", "org/model")
    assert done.returncode == 0, done.stderr
    written = {path.relative_to(work).as_posix() for path in work.rglob("*") if path.is_file()}
    assert {"pipelines/default.yaml", ".gitlab-ci.yml", ".github/workflows/deliver.yml"} <= written
    assert any(name.startswith("smoke/") for name in written)
    assert "\nmodel: org/model\n" in (work / "pipelines" / "default.yaml").read_text("utf-8")
    done = deliver("ci", "gitlab")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (work / ".gitlab-ci.yml").read_text("utf-8")
    done = deliver("explain", "runtime-not-measured")
    assert "no compare report measured" in done.stdout
    again = deliver("init")
    assert again.returncode == 2
    assert "error[init-exists]" in again.stderr
    chart = tmp_path / "site" / "delivery" / "release" / "chart_template"
    clone = Path("delivery/release/chart_template")
    names = [
        {p.relative_to(root) for p in root.rglob("*") if p.is_file() and p.suffix != ".pyc"}
        for root in (chart, clone)
    ]
    assert names[0] == names[1]
