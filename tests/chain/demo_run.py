"""`deliver run` of the demo's pipeline in a process of its own, as users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PIPELINE = Path(__file__).parents[2] / "pipelines" / "default.yaml"
DELIVER = (sys.executable, "-c", "import sys; from delivery.cli import main; sys.exit(main())")


@dataclass(frozen=True)
class Ran:
    """A finished `deliver run --json`: exit code, the object on stdout, and what stood on stderr."""

    code: int
    shown: dict[str, Any]
    err: str

    def step(self, name: str) -> dict[str, Any]:
        return next(s for s in self.shown["steps"] if s["name"] == name)

    @property
    def names(self) -> list[str]:
        return [s["name"] for s in self.shown["steps"]]

    @property
    def cached(self) -> list[str]:
        return [s["name"] for s in self.shown["steps"] if s["cached"]]


def user_environment() -> dict[str, str]:
    """This process's environment with as many threads as there are cores; tests have one."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def run_demo(workdir: Path, *args: str) -> Ran:
    """`deliver run` of the demo's pipeline, in a process of its own."""
    command = [*DELIVER, "run", str(PIPELINE), "--workdir", str(workdir), "--json", *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=workdir.parent, env=user_environment())
    lines = done.stdout.strip().splitlines()
    return Ran(done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr)
