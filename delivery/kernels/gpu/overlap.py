"""Programmatic dependent launch: a kernel starts while the one in front of it is still running.

Every kernel of a step calls `gdc_launch_dependents` first, which lets the next one start as soon as all
programs of this one have (attention over many sequences calls it last, since it takes long and what waits
beside it slows it down), and `gdc_wait` before it touches what another kernel wrote or may still read. Two
rules keep that right, however long the chain: every program waits, even one with nothing to do, so that
a kernel never ends before the one in front of it; and only weights and a step's inputs, which no kernel
of the step writes, are read before the wait.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait", "overlaps"]


@cache
def overlaps(device: torch.device) -> bool:
    """Whether launches on a device may overlap: Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
