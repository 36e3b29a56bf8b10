"""Run the fake pipeline in a process of its own: `fake_run.py WORKDIR PIPELINE [OVERRIDE]...`.

Prints the digests that were made. With KILL_POINTS=1 it is a harness instead: it forks children that are
killed at their n-th access to the workdir, one after another, until one lives to the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import fake_steps

from delivery.pipeline.progress import Lines
from delivery.pipeline.runner import run
from delivery.pipeline.spec import load_pipeline
from delivery.pipeline.store import Store

ACCESSES = {"open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.symlink"}


def go(workdir: Path, pipeline: Path, overrides: list[str]) -> dict[str, str]:
    loaded = load_pipeline(pipeline, overrides, steps=fake_steps.STEPS)
    result = run(loaded, Store(workdir), Lines(sys.stderr), render=fake_steps.render)
    if result.error is not None:
        raise result.error
    return {s.name: s.artifact.digest for s in result.steps}


def killed_child(workdir: Path, pipeline: Path, at: int) -> bool:
    """Run in a child that dies at its `at`-th access below the workdir. Whether it died."""
    child = os.fork()
    if child == 0:
        left = at

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in ACCESSES and any(str(workdir) in str(a) for a in arguments[:2]):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        go(workdir, pipeline, [])
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def kill_points(root: Path, pipeline: Path, step: int) -> dict[str, object]:
    """Die at point 1, 1 + step, …: each time in a new workdir, then finish there and compare."""
    expected = go(root / "undisturbed", pipeline, [])
    at, points, differing = 1, 0, []
    while killed_child(root / f"w{at}", pipeline, at):
        store = Store(root / f"w{at}")
        damaged = [a.digest for a in store.artifacts() if store.damage(a) is not None]
        if damaged or go(root / f"w{at}", pipeline, []) != expected:
            differing.append(at)
        at, points = at + step, points + 1
    return {"points": points, "differing": differing}


if __name__ == "__main__":
    first, second = Path(sys.argv[1]), Path(sys.argv[2])
    if os.environ.get("KILL_POINTS"):
        print(json.dumps(kill_points(first, second, int(os.environ["KILL_POINTS"]))))
    else:
        print(json.dumps(go(first, second, sys.argv[3:])))
