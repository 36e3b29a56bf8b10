"""Ctrl-C and SIGTERM are never lost: a signal that arrives at a bad moment is sent again shortly after.

Some large packages catch every exception while they are imported. A KeyboardInterrupt raised there would be
swallowed, or would leave a half-initialised module that fails later as if it were a bug; so it is deferred
until the import is over. In a destructor Python itself swallows it, with a traceback on stderr: it is resent.
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
    """A signal handler: raises KeyboardInterrupt now, or after the import that is in progress."""
    if not _importing(frame):
        raise KeyboardInterrupt
    _again(number)


def _again(number: int) -> None:
    later = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    later.daemon = True
    later.start()


@contextmanager
def interruptible(number: int = signal.SIGINT) -> Iterator[None]:
    """Handle the signal with `interrupt` inside the context.

    Does nothing outside the main thread, or when the caller ignores the signal (as shells ignore Ctrl-C for
    background processes).
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
    """Silence errors from the destructors of half-made objects while exiting after an interruption."""
    sys.unraisablehook = lambda _: None


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False
