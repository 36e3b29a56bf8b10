"""Ctrl-C that is not lost: one that comes while a module is imported waits until the import is over.

Large packages catch everything while they load. A KeyboardInterrupt in there is swallowed, and the command
goes on, or leaves half a module behind that fails later as if it were a bug.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_AGAIN_S = 0.1
_IMPORT = "<frozen importlib._bootstrap>"


def interrupt(number: int, frame: FrameType | None) -> None:
    """A signal handler: raises KeyboardInterrupt, now or when the import that it came into is over."""
    if not _importing(frame):
        raise KeyboardInterrupt
    later = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    later.daemon = True
    later.start()


@contextmanager
def interruptible(number: int = signal.SIGINT) -> Iterator[None]:
    """Inside, the signal interrupts by `interrupt`. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False
