"""Ctrl-C while a module is imported that swallows everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
