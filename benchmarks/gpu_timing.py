"""How the benchmarks time on a GPU; `deliver build` measures with the same functions."""

from __future__ import annotations

import statistics

import torch

from delivery.kernels.gpu.timing import COLD_BYTES, copies_for, graph_us

__all__ = ["COLD_BYTES", "copies_for", "copy_bandwidth", "graph_us"]


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large device-to-device copy: the memory ceiling."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * source.numel() * source.element_size() / statistics.median(times[2:])
