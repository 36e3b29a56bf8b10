"""Timing on a GPU: many launches in one CUDA graph, over inputs that do not fit the cache.

A graph takes the gaps of launching from Python out; rotating among copies of the weights, together several
times the L2, keeps a kernel from finding them cached; the figure is the median over replays.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence

import torch

from delivery.kernels.gpu.recording_stream import recording_stream

COLD_BYTES = 240 << 20
"""Four times the 60 MB L2 of an H200."""


def copies_for(size_bytes: int) -> int:
    """How many copies of an input are colder than the cache."""
    return max(2, min(64, -(-COLD_BYTES // max(1, size_bytes))))


def graph_us(calls: Sequence[Callable[[], object]], *, launches: int = 0, replays: int = 9) -> float:
    """Median µs of one call, when `calls` run one behind the other, over and over."""
    total = max(launches, len(calls))
    stream = recording_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # what garbage holds on the device cannot be destroyed during a recording
        graph.capture_begin()
        try:
            for i in range(total):
                calls[i % len(calls)]()
        finally:
            graph.capture_end()
            if collecting:
                gc.enable()
        graph.replay()
        times = []
        for _ in range(replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) * 1000 / total)
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(times)
