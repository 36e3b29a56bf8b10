"""Counters by which the last program of several to arrive finishes their common result."""

from __future__ import annotations

import torch
import triton

_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


def arrival_counters(device: torch.device, count: int) -> torch.Tensor:
    """int32 zeros, at least `count`; the program that arrives last puts its counter back to zero.

    One buffer for all launches of a device, which must therefore be in one stream's order. Never freed,
    since a captured graph keeps its address.
    """
    size = triton.next_power_of_2(max(count, 1024))
    if (device, size) not in _counters:
        _counters[device, size] = torch.zeros(size, dtype=torch.int32, device=device)
    return _counters[device, size]
