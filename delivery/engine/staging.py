"""Staging: a step's inputs written on the host, sent to fixed places on the device by one copy.

On a GPU the staging memory is pinned and there are several pieces of it, so that one may be filled while
another still travels; on a CPU what is written is what is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_STAGES = 3
_LINE = 128
_KINDS = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


class Staging:
    """Named integer arrays in one allocation, in the order given; of the last one, `send` sends a part."""

    def __init__(self, sizes: Mapping[str, tuple[type[np.signedinteger], int]], device: torch.device) -> None:
        self._spans: dict[str, tuple[int, int]] = {}
        self._dtypes: dict[str, np.dtype[np.signedinteger]] = {}
        total = 0
        for name, (kind, size) in sizes.items():
            dtype = np.dtype(kind)
            self._dtypes[name] = dtype
            self._spans[name] = (total, total + size * dtype.itemsize)
            total += -(-size * dtype.itemsize // _LINE) * _LINE
        self._last = self._spans[name][0]
        cuda = device.type == "cuda"
        self._stages = [
            torch.zeros(total, dtype=torch.uint8, pin_memory=cuda) for _ in range(_STAGES if cuda else 1)
        ]
        self._buffer = self._stages[0]
        if cuda:
            self._buffer = torch.zeros(total, dtype=torch.uint8, device=device)
        self._views = [self._host_views(stage) for stage in self._stages]
        self._device = {
            name: self._buffer[first:last].view(_KINDS[self._dtypes[name]])
            for name, (first, last) in self._spans.items()
        }
        self._sent = [torch.cuda.Event() for _ in self._stages] if cuda else []
        self._at = 0

    def _host_views(self, stage: torch.Tensor) -> dict[str, np.ndarray]:
        raw = stage.numpy()
        return {n: raw[first:last].view(self._dtypes[n]) for n, (first, last) in self._spans.items()}

    def next(self) -> None:
        """Turn to the next piece of staging memory; waits only if its last copy has not left yet."""
        self._at = (self._at + 1) % len(self._stages)
        if self._sent:
            self._sent[self._at].synchronize()

    def host(self, name: str) -> np.ndarray:
        """An array to be written."""
        return self._views[self._at][name]

    def send(self, last: int) -> None:
        """Copy to the device; of the last array only the first `last` elements."""
        if self._sent:
            name = next(reversed(self._spans))
            end = self._last + last * self._dtypes[name].itemsize
            self._buffer[:end].copy_(self._stages[self._at][:end], non_blocking=True)
            self._sent[self._at].record()

    def device(self, name: str, size: int) -> torch.Tensor:
        """The first `size` elements of an array, as the device sees them; always at the same address."""
        return self._device[name][:size]
