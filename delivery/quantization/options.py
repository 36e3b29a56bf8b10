"""Options: what a user can choose about quantising; a scheme reads what concerns it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from delivery.quantization.awq import Duo
from delivery.quantization.gptq import ActOrder
from delivery.quantization.grid import Grid
from delivery.quantization.group_size import GroupSizes

Rounding = Literal["nearest", "gptq"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a user can choose; a scheme reads what concerns it.

    symmetric, narrow: the integer grid (see `Grid`). clip: search narrower ranges per group.
    rounding: to the nearest value, or as GPTQ does, with errors compensated in later columns.
    duo, points: AWQ's search. act_order, damping: GPTQ's solver. alpha, search_scale: SmoothQuant.
    outliers: share of the weights kept at 6 bit (0 for none).
    """

    group_sizes: GroupSizes = field(default_factory=GroupSizes)
    symmetric: bool = False
    narrow: bool = False
    clip: bool = False
    rounding: Rounding = "nearest"
    duo: Duo = "both"
    points: int = 0
    act_order: ActOrder = "static"
    damping: float = 0.1
    alpha: float = 0.5
    search_scale: bool = False
    outliers: float = 0.0
    scale_dtype: torch.dtype = torch.float16

    def grid(self, group_size: int) -> Grid:
        """The 4-bit grid for a layer with that group size."""
        return Grid(4, group_size, self.symmetric, self.narrow, self.scale_dtype)
