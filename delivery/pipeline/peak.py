"""Peak memory of a piece of work in this process, as the kernel counted it."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"  # proc(5), clear_refs


class PeakMeter:
    """Resets the process' resident high-water mark, and reads it later."""

    def __init__(self) -> None:
        with suppress(OSError):
            (_PROCESS / "clear_refs").write_text(_RESET_PEAK, "ascii")

    def peak_bytes(self) -> int | None:
        """The highest resident size since the meter was made; None where the kernel does not tell."""
        try:
            found = re.search(r"VmHWM:\s+(\d+) kB", (_PROCESS / "status").read_text("ascii"))
        except OSError:
            return None
        return int(found[1]) * 1024 if found else None
