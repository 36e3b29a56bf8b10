"""Advisory locks between runs in one workdir: `flock`, which the kernel drops when a process dies."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@contextmanager
def locked(
    path: Path,
    *,
    shared: bool = False,
    on_wait: Callable[[str], None] | None = None,
    wait: bool = True,
) -> Iterator[bool]:
    """Hold the lock file `path`; yields whether it was acquired (always, with `wait`).

    `on_wait` is called with the holder's name before waiting for the lock. Lock files are never removed here:
    a removed one could be locked twice.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        had = _take(descriptor, shared, block=False)
        if not had and wait:
            if on_wait:
                on_wait(os.pread(descriptor, 64, 0).decode("ascii", "replace") or "another run")
            had = _take(descriptor, shared, block=True)
        if had and not shared:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
        yield had
    finally:
        os.close(descriptor)


def _take(descriptor: int, shared: bool, *, block: bool) -> bool:
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, mode if block else mode | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
