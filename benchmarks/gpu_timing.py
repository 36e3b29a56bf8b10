"""How the benchmarks time on a GPU; `deliver build` measures with the same functions."""

from __future__ import annotations

import statistics
from types import TracebackType
from typing import Any

import torch

from delivery.kernels.gpu.timing import COLD_BYTES, copies_for, graph_us

__all__ = ["COLD_BYTES", "Compiled", "copies_for", "copy_bandwidth", "graph_us"]


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


class Compiled:
    """`names` of the kernels that Triton compiles, or reads from its cache on disk, between `with` and its
    end: once an engine is ready there should be none."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> Compiled:
        from triton import knobs

        self._before = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self._seen
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = self._before

    def _seen(self, *_args: Any, **given: Any) -> None:
        self.names.append(str(given["fn"].name))
