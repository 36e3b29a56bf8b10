"""Memory of a process under load, apart from what it held when its model was loaded."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident memory of this process in bytes: now, and at most since the last reset."""

    now: int
    peak: int


def resident() -> Resident:
    """From /proc on Linux, elsewhere from psutil (peak then equals now)."""
    if _STATUS.exists():
        fields = dict(line.split(":", 1) for line in _STATUS.read_text("utf-8").splitlines() if ":" in line)
        now, peak = (int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
        return Resident(now, peak)
    import psutil

    now = int(psutil.Process().memory_info().rss)
    return Resident(now, now)


def reset_peak() -> None:
    """Restart the peak from now; without permission it keeps counting from the start of the process."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        pass


def give_back() -> None:
    """Let the C library return freed memory to the system, so that resident means in use."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        pass  # another C library keeps what it keeps


class MemoryWatch:
    """Starts when an engine is loaded; `breakdown` says what a load then needed on top of it.

    Kernels should have been compiled before: a compiler needs more memory than the activations do.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        gc.collect()
        give_back()
        reset_peak()
        self._loaded = resident()
        if device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
            self._allocated = int(torch.cuda.memory_allocated())
            self._runtime = max(device_bytes() - int(torch.cuda.memory_reserved()), 0)

    def breakdown(self, stats: Any) -> dict[str, float]:
        """Bytes by part, from an engine's `stats()` and this process.

        `peak_bytes` is the activation peak alone: allocator bytes over the loaded state on a GPU,
        resident bytes over the loaded state on a CPU. `planned_peak_bytes` is what the engine reserved.
        `runtime_bytes`, on a GPU: what the driver held for this process when the load began, outside the
        allocator: its context, loaded kernels, recordings.
        """
        process = resident()
        out = {
            "weights_bytes": float(stats.weights_bytes),
            "kv_bytes": float(stats.kv_bytes),
            "kv_tokens": float(stats.kv_tokens),
            "overhead_bytes": float(stats.overhead_bytes),
            "planned_peak_bytes": float(stats.peak_bytes),
            "loaded_bytes": float(self._loaded.now),
            "peak_bytes": float(max(process.peak - self._loaded.now, 0)),
            "process_bytes": float(max(process.peak, process.now)),
            "resident_bytes": float(process.now),
        }
        if self._device == "cuda":
            import torch

            peak = int(torch.cuda.max_memory_allocated()) - self._allocated
            held = float(device_bytes())
            out |= {"peak_bytes": float(peak), "process_bytes": held, "resident_bytes": held}
            out["runtime_bytes"] = float(self._runtime)
        return out


def device_bytes() -> int:
    """Memory of the first GPU that this process holds by NVML; by the allocator where NVML hides it."""
    import os

    import pynvml
    import torch

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    mine = [
        p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()
    ]
    used = sum(int(m) for m in mine if m)
    return used or int(torch.cuda.memory_reserved())
