"""Disturbance: what else the machine did during a run. Swapping or foreign load makes it invalid."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

_VMSTAT = Path("/proc/vmstat")

MAX_FOREIGN_RATIO = 0.5
"""Share of the processors that others may use before a CPU measurement says nothing."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """foreign_cpu_ratio: processor time that went to others (or was stolen by the hypervisor), of all.

    swapped_pages: pages swapped in or out meanwhile. foreign_device_ratio: memory of the GPU that others
    held when the engine was about to be loaded, of all.
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
    """Share of the first GPU's memory that processes outside of this measurement hold."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    held = {p.pid: int(p.usedGpuMemory or 0) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    return round(foreign_bytes(int(memory.used), held, measuring_processes()) / float(memory.total), 4)


def foreign_bytes(used_bytes: int, held_bytes: Mapping[int, int], ours: Set[int]) -> int:
    """Memory in use on a GPU less what the processes `ours` hold; `held_bytes` by process id.

    Where NVML shows no processes (some containers), everything in use counts as foreign.
    """
    return max(used_bytes - sum(size for pid, size in held_bytes.items() if pid in ours), 0)


def measuring_processes() -> set[int]:
    """Ids of the processes that take part in a measurement: this one, the one that started it as a worker,
    and what either of them started, such as the other side of a pair."""
    import psutil

    parent = multiprocessing.parent_process()
    root = psutil.Process(parent.pid if parent is not None else None)
    return {root.pid, *(child.pid for child in root.children(recursive=True))}
