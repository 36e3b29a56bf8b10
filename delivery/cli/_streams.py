"""Standard streams that the caller has closed, or that cannot write every character."""

from __future__ import annotations

import io
import os
import sys

_STREAMS = ("stdin", "stdout", "stderr")


def open_streams() -> None:
    """Open closed streams on /dev/null, escape characters that cannot be written, read bad bytes as U+FFFD.

    If a stream stayed closed, the next file to be opened would get its descriptor and receive what is meant
    for the stream, here or in a child process.
    """
    for number, name in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            stream = os.fdopen(_nowhere(number), mode, encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    for written in (sys.stdout, sys.stderr):
        if isinstance(written, io.TextIOWrapper) and written.errors == "strict":
            written.reconfigure(errors="backslashreplace")


def _nowhere(number: int) -> int:
    """A descriptor of /dev/null: `number` itself, unless it is already in use."""
    opened = os.open(os.devnull, os.O_RDWR)
    if opened == number:
        os.set_inheritable(number, True)
        return number
    try:
        os.fstat(number)
    except OSError:
        os.dup2(opened, number)
        os.close(opened)
        return number
    return opened
