"""Ctrl-C and SIGTERM that are not lost: one that comes at a bad moment comes again a little later.

Large packages catch everything while they load. A KeyboardInterrupt in there is swallowed, and the command
goes on, or leaves half a module behind that fails later as if it were a bug: it waits until the import is
over. In a destructor Python itself swallows it, with a traceback on stderr: it is sent again.
"""

from __future__ import annotations

import os
import signal
import sys
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
    _again(number)


def _again(number: int) -> None:
    later = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    later.daemon = True
    later.start()


@contextmanager
def interruptible(number: int = signal.SIGINT) -> Iterator[None]:
    """Inside, the signal interrupts by `interrupt`.

    Does nothing outside the main thread, and where the caller has it ignored, as shells have Ctrl-C for what
    they run in the background.
    """
    ignored = signal.getsignal(number) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    before, shown = signal.signal(number, interrupt), sys.unraisablehook

    def swallowed(args: sys.UnraisableHookArgs) -> None:
        if issubclass(args.exc_type, KeyboardInterrupt):
            _again(number)
        else:
            shown(args)

    sys.unraisablehook = swallowed
    try:
        yield
    finally:
        sys.unraisablehook = shown
        signal.signal(number, before)


def quiet_end() -> None:
    """On the way out after an interruption: objects that it left half made have nothing to say."""
    sys.unraisablehook = lambda _: None


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False
