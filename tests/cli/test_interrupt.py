"""Ctrl-C and SIGTERM at bad moments: while a module is imported that swallows everything, in a destructor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_steps
import pytest

from delivery.cli._interrupt import interruptible

GREEDY = """
import time
from pathlib import Path
Path("importing").touch()
try:
    time.sleep(1)
except BaseException:
    Path("swallowed").touch()
Path("imported").touch()
"""
PROGRAM = """
import sys, time
from delivery.cli._interrupt import interruptible
with interruptible():
    import greedy
    time.sleep(60)
"""


@pytest.mark.parametrize("when", ["importing", "imported"])
def test_it_is_not_lost(when: str, tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY)
    (tmp_path / "program.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while not (tmp_path / when).exists() and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode in (1, -signal.SIGINT)
    assert err.strip().endswith("KeyboardInterrupt")
    assert (tmp_path / "imported").exists()
    assert not (tmp_path / "swallowed").exists()


SWALLOWED = """
import os, signal, sys, time
from delivery.cli._interrupt import interruptible
class Slow:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
with interruptible(signal.SIGTERM):
    Slow()
    time.sleep(60)
"""


def test_one_that_python_swallows_comes_again(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SWALLOWED)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stderr.strip().endswith("KeyboardInterrupt")
    assert "Exception ignored" not in done.stderr


def fakes(folder: Path, *words: str) -> subprocess.Popen[str]:
    """`deliver` with the fake steps, once a step of it waits for a signal."""
    code = "import sys, fake_steps; from delivery.cli import main; sys.exit(main(steps=fake_steps.STEPS))"
    path = [Path(__file__).parents[2], Path(__file__).parents[1] / "pipeline"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words, "--json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while not list(folder.glob(".deliver/**/waiting")) and time.monotonic() < end:
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_step_alone_ends_politely(number: int, tmp_path: Path) -> None:
    """Its temporary folder is gone, and `--json` still gets its one object."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text('{"architectures": ["A"]}')
    process = fakes(tmp_path, "shrink", "--checkpoint", "hf", "--wait-s", "60", "--out", "o")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(out)["error"]["code"] == "interrupted"
    assert err.strip().endswith("interrupted")
    assert not (tmp_path / "o").exists()
    assert list((tmp_path / ".deliver/tmp").iterdir()) == []


def test_a_run_that_is_broken_off_tells_what_it_has_made(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(fake_steps.PIPELINE)
    process = fakes(tmp_path, "run", "p.yaml", "--set", "shrink.wait_s=60")
    process.send_signal(signal.SIGTERM)
    told = json.loads(process.communicate(timeout=30)[0])
    assert [step["name"] for step in told["steps"]] == ["make"]
    assert (told["passed"], told["release"], told["error"]["code"]) == (False, None, "interrupted")


def test_one_that_the_caller_ignores_is_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible(signal.SIGINT):
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
