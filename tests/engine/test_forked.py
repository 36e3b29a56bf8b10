"""Engines in processes made by fork(): where torch's threads are missing, one error and no hang."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

BEGIN = """
import os, sys, torch
MODEL = sys.argv[1]
def used_threads():
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1)
def made():
    from delivery.engine import LLM, SamplingParams
    llm = LLM(MODEL, device="cpu")
    return llm, lambda: llm.generate(["hello"], SamplingParams(max_tokens=2, temperature=0.0))[0].token_ids
def told(work):
    from delivery.errors import UsageError
    try:
        print("ran", work(), flush=True)
    except UsageError as error:
        print(error.code, error.hint, flush=True)
def in_fork(work):
    child = os.fork()
    if child == 0:
        told(work)
        os._exit(0)
    os.waitpid(child, 0)
"""


def outcome(code: str, model: Path) -> str:
    """What a process prints, and its copies; one that hangs is an error after a minute."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BEGIN + textwrap.dedent(code), str(model)],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        # An engine of the first process, in the copy.
        "used_threads(); llm, run = made(); in_fork(run)",
        # One that the copy makes, where the first process had loaded the engine's code,
        "import delivery.engine.llm; used_threads(); in_fork(lambda: made()[1]())",
    ],
)
def test_a_copy_without_its_threads_is_told(code: str, tiny_checkpoint: Path) -> None:
    out = outcome(code, tiny_checkpoint)
    assert out.startswith('engine-forked multiprocessing.get_context("spawn")'), out


def test_a_pool_that_forks_is_told_too(tiny_checkpoint: Path) -> None:
    code = """
    import multiprocessing
    used_threads()
    process = multiprocessing.get_context("fork").Process(target=told, args=(lambda: made()[1](),))
    process.start()
    process.join()
    """
    assert outcome(code, tiny_checkpoint).startswith("engine-forked")


def test_a_copy_that_can_compute_may(tiny_checkpoint: Path) -> None:
    """The first process has computed nothing in threads: nothing is missing."""
    assert outcome("import delivery.engine.llm; in_fork(lambda: made()[1]())", tiny_checkpoint).startswith(
        "ran ["
    )


@pytest.mark.parametrize(
    ("work", "comes_back"),
    [
        ("lambda: None", True),
        # A machine too busy to run it for longer than a copy may sleep: it could run, and does in the end.
        ("lambda: os.kill(os.getpid(), signal.SIGSTOP)", True),
        ("lambda: time.sleep(100)", False),
        ("lambda: [0 for _ in iter(int, 1)]", False),
    ],
)
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are seen in /proc")
def test_slow_is_not_stuck(work: str, comes_back: bool, tiny_checkpoint: Path) -> None:
    code = f"""
    import signal, threading, time
    from delivery.engine import forked
    forked._ASLEEP_S, forked._SPUN_S = 0.3, 0.4
    fork = os.fork
    def slow_fork():
        child = fork()
        if child:
            threading.Timer(1.5, os.kill, (child, signal.SIGCONT)).start()
        return child
    os.fork = slow_fork if "SIGSTOP" in {work!r} else fork
    print(forked._comes_back({work}))
    """
    assert outcome(code, tiny_checkpoint) == f"{comes_back}\n"
