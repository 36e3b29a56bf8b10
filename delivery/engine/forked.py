"""Engines in a process made by fork(): what torch's threads leave behind, seen before it hangs.

OpenMP keeps its threads for the next loop. fork() copies the thread that calls it and none of the others,
so that the copy waits for ever for threads that it has not got. Nothing tells a process that it is in that
state, and a loop that hangs cannot be called off. So the loop is run in a second copy, which has what this
process has, and which can be ended. Whether that copy hangs is told from its threads and the processor time
that it used: on a busy machine a loop that is sound may take any time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from delivery.errors import UsageError

_ASLEEP_S, _ASLEEP_LOOKS = 2.0, 20
"""For how long, and how many times in a row, no thread is seen that could run: all wait for what is not."""
_SPUN_S = 10.0
"""Processor time of a loop that needs a thousandth of a second: it waits by spinning."""
_UNSEEN_S = 120.0
"""Time to wait where threads cannot be seen."""
_PARALLEL = 1 << 18
"""Elements of an operation that torch gives to several threads."""
_born = os.getpid()
_sound: set[int] = set()
"""Processes that were looked at and can compute."""


def check_process() -> None:
    """Raises UsageError `engine-forked` in a copy of a process that had used torch's threads, or a GPU."""
    here = os.getpid()
    if here in _sound or not _is_copy():
        return
    if getattr(torch.cuda, "_is_in_bad_fork", lambda: False)():
        raise _refused("the process that it was copied from had used the GPU")
    if torch.get_num_threads() > 1 and _hangs():
        raise _refused("the process that it was copied from had used torch's threads, which were not copied")
    _sound.add(here)


def _is_copy() -> bool:
    forked = type(multiprocessing.current_process()).__name__ == "ForkProcess"
    return forked or os.getpid() != _born


def _hangs() -> bool:
    """Whether a loop over several threads never comes back in a process such as this one."""
    return not _comes_back(lambda: torch.ones(_PARALLEL).add_(1))


def _comes_back(work: Callable[[], object]) -> bool:
    """Run `work` in a copy of this process: whether it ends. One that never would is killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: that is the matter
        child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    watch = _Watch(child, time.monotonic())
    while not watch.is_stuck():
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@dataclass(slots=True)
class _Watch:
    """A process that is being looked at again and again, since `started` by the monotonic clock."""

    process: int
    started: float
    _since: float = 0.0
    _looks: int = 0
    _used_s: float = -1.0

    def is_stuck(self) -> bool:
        now, threads = time.monotonic(), _threads(self.process)
        if threads is None:
            return now - self.started > _UNSEEN_S
        used_s = sum(seconds for _, seconds in threads)
        if used_s != self._used_s or any(state != "S" for state, _ in threads):
            self._since, self._looks, self._used_s = now, 0, used_s
        self._looks += 1
        asleep = now - self._since > _ASLEEP_S and self._looks > _ASLEEP_LOOKS
        return asleep or used_s > _SPUN_S


def _threads(process: int) -> list[tuple[str, float]] | None:
    """State (R runs or could, S sleeps, ...) and processor seconds of each thread; None where unknown."""
    found = []
    try:
        for task in Path(f"/proc/{process}/task").iterdir():
            fields = (task / "stat").read_text("utf-8").rpartition(")")[2].split()
            found.append((fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")))
    except (OSError, ValueError, IndexError):
        return None
    return found or None


def _refused(why: str) -> UsageError:
    return UsageError(
        "engine-forked",
        "an engine cannot run in this process, which was made by fork()",
        why=why,
        hint='multiprocessing.get_context("spawn"), and make the LLM in the new process',
    )
