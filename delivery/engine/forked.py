"""Engines in a process made by fork(): what torch's threads leave behind, seen before it hangs.

OpenMP keeps its threads for the next loop. fork() copies the thread that calls it and none of the others,
so that the copy waits for ever for threads that it has not got. Nothing tells a process that it is in that
state, and a loop that hangs cannot be called off. So the loop is run in a second copy, which has what this
process has, and which can be ended.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings

import torch

from delivery.errors import UsageError

_WAIT_S = 10.0
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: that is the matter
        child = os.fork()
    if child == 0:
        torch.ones(_PARALLEL).add_(1)
        os._exit(0)
    end = time.monotonic() + _WAIT_S
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _refused(why: str) -> UsageError:
    return UsageError(
        "engine-forked",
        "an engine cannot run in this process, which was made by fork()",
        why=why,
        hint='multiprocessing.get_context("spawn"), and make the LLM in the new process',
    )
