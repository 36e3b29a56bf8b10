"""Peak memory of this process during a piece of work, as counted by the kernel."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"  # proc(5), clear_refs


class PeakMeter:
    """Resets the process' peak resident size, and reads it later."""

    def __init__(self) -> None:
        with suppress(OSError):
            (_PROCESS / "clear_refs").write_text(_RESET_PEAK, "ascii")

    def peak_bytes(self) -> int | None:
        """The peak resident size since the meter was made; None if the kernel does not report it."""
        try:
            found = re.search(r"VmHWM:\s+(\d+) kB", (_PROCESS / "status").read_text("ascii"))
        except OSError:
            return None
        return int(found[1]) * 1024 if found else None
