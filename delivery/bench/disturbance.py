"""Disturbance: what else the machine did during a run. Swapping or foreign load makes it invalid."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

_VMSTAT = Path("/proc/vmstat")

MAX_FOREIGN_RATIO = 0.5
"""Share of the processors that others may use before a CPU measurement says nothing."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """foreign_cpu_ratio: processor time that went to others (or was stolen by the hypervisor), of all.

    swapped_pages: pages swapped in or out meanwhile. foreign_device_ratio: memory of the GPU that others
    held, of all.
    """

    foreign_cpu_ratio: float = 0.0
    swapped_pages: int = 0
    foreign_device_ratio: float = 0.0

    def why_invalid(self, max_foreign_ratio: float = MAX_FOREIGN_RATIO) -> str:
        """What makes the measurement worthless; empty when nothing does."""
        if self.swapped_pages:
            return f"the machine swapped {self.swapped_pages} pages meanwhile"
        if self.foreign_cpu_ratio > max_foreign_ratio:
            return (
                f"other processes used {self.foreign_cpu_ratio:.0%} of the processors "
                f"(at most {max_foreign_ratio:.0%})"
            )
        if self.foreign_device_ratio > max_foreign_ratio:
            return f"other processes held {self.foreign_device_ratio:.0%} of the GPU's memory"
        return ""


class DisturbanceWatch:
    """Counts from construction to `stop`. Only this process and its children count as ours."""

    def __init__(self, device: str = "cpu") -> None:
        self._foreign_device = _foreign_device_ratio() if device == "cuda" else 0.0
        self._busy, self._own, self._swapped = _busy_s(), _own_s(), _swapped_pages()
        self._start = time.monotonic()

    def stop(self) -> Disturbance:
        import psutil

        capacity_s = (time.monotonic() - self._start) * (psutil.cpu_count() or 1)
        foreign_s = (_busy_s() - self._busy) - (_own_s() - self._own)
        return Disturbance(
            foreign_cpu_ratio=round(min(1.0, max(0.0, foreign_s / capacity_s if capacity_s > 0 else 0.0)), 4),
            swapped_pages=_swapped_pages() - self._swapped,
            foreign_device_ratio=self._foreign_device,
        )


def _busy_s() -> float:
    """CPU seconds of all processes, including time stolen by the hypervisor."""
    import psutil

    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_s() -> float:
    import psutil

    times = psutil.Process().cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def _swapped_pages() -> int:
    if not _VMSTAT.exists():
        return 0
    fields = dict(line.split() for line in _VMSTAT.read_text("utf-8").splitlines())
    return int(fields.get("pswpin", 0)) + int(fields.get("pswpout", 0))


def _foreign_device_ratio() -> float:
    """Share of the first GPU's memory in use before we use any of it."""
    import pynvml

    pynvml.nvmlInit()
    memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    return round(float(memory.used) / float(memory.total), 4)
