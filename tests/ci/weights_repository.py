"""A git repository with weights, and the machine that its jobs run on; both CI tests use them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent


@dataclass
class Repository:
    path: Path

    def git(self, *arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=self.path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, message: str) -> str:
        self.git("add", "--all")
        self.git("commit", "-q", "-m", message)
        return self.git("rev-parse", "HEAD")


def environment() -> dict[str, str]:
    """What the jobs' machine has: deliver, git, and an engine of known speed."""
    kept = {k: v for k, v in os.environ.items() if k in ("HOME", "LANG", "TMPDIR")}
    return {
        **kept,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(HERE / "planted"),
        "CUDA_VISIBLE_DEVICES": "",
    }
