"""Integer grids: round a weight to a few bits per group of input features, and back.

Pure tensor functions. Every scheme that makes integers goes through `quantize`, so that scales are
computed, rounded to their stored dtype and made safe (no zero, no infinity) in one place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from delivery.errors import DataError, UsageError
from delivery.qtensor import QTensor


@dataclass(frozen=True, slots=True)
class Grid:
    """What values a group can take.

    bits: 2 to 8. group_size: input features per scale, −1 for the whole row.
    symmetric: no zero point; integers −2^(b−1) .. 2^(b−1)−1 with scale absmax / (2^b − 1) · 2, as
        compressed-tensors has it (4 bit: −8..7, absmax / 7.5), or with `narrow` −7..7 and absmax / 7.
    asymmetric: integers 0 .. 2^b − 1 with a zero point; the range always holds 0.
    scale_dtype: dtype in which scales are stored; values are rounded against the stored scale.
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = False
    narrow: bool = False
    scale_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if self.bits not in range(2, 9):
            raise UsageError(
                "not-quantisable",
                f"unsupported bit width {self.bits!r}",
                why="expected a whole number from 2 to 8: values are held in 8 bits",
            )

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest integer."""
        if not self.symmetric:
            return 0, 2**self.bits - 1
        half = 2 ** (self.bits - 1)
        return (1 - half if self.narrow else -half), half - 1

    @property
    def steps(self) -> float:
        """How many scales the range spans: highest − lowest value, or twice the largest."""
        low, high = self.bounds
        return float(high - low)

    def width(self, columns: int) -> int:
        """Features per group for a weight with `columns` input features."""
        return columns if self.group_size == -1 else self.group_size


INT8_CHANNEL = Grid(bits=8, group_size=-1, symmetric=True, narrow=True, scale_dtype=torch.float32)


def quantize(
    weight: torch.Tensor,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = False,
    narrow: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    shrink: torch.Tensor | None = None,
) -> QTensor:
    """Round-to-nearest: weight [N, K] of any float dtype → QTensor, on the same device.

    shrink: float [N, K/g] in (0, 1], by which each group's range is narrowed (clipping); None for 1.
    Arithmetic is in float32. A group of zeros gets scale 1, so that nothing is ever divided by 0.
    Raises UsageError `not-quantisable` for other bits than 2 to 8 or a weight that is no matrix of floats,
    DataError `group-size` when K is not a multiple of `group_size`, `weight-not-finite`.
    """
    grid = Grid(bits, group_size, symmetric, narrow, scale_dtype)
    return round_to_grid(weight, grid, shrink)


def dequantize(qtensor: QTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight [N, K] that a QTensor represents."""
    return qtensor.dequantize(dtype)


def round_to_grid(weight: torch.Tensor, grid: Grid, shrink: torch.Tensor | None = None) -> QTensor:
    """`quantize` with the grid as a value."""
    groups = grouped(weight, grid)
    scale, zero_point = parameters(groups, grid, shrink)
    check_finite(scale)
    low, high = grid.bounds
    values = (groups / scale.float()[..., None]).round_()
    if zero_point is not None:
        values += zero_point[..., None]
    values.clamp_(low, high)
    return QTensor(
        qdata=values.to(torch.int8 if grid.symmetric else torch.uint8).reshape(weight.shape).contiguous(),
        scale=scale,
        zero_point=None if zero_point is None else zero_point.to(torch.uint8),
        group_size=grid.group_size,
        bits=grid.bits,
    )


def parameters(
    groups: torch.Tensor, grid: Grid, shrink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale [N, K/g] in `grid.scale_dtype`, and zero point [N, K/g] (float32, integral) or None.

    groups: float32 [N, K/g, g].
    """
    if grid.symmetric:
        span = 2 * torch.maximum(groups.amax(-1), -groups.amin(-1))
        low = None
    else:
        low = groups.amin(-1).clamp_max_(0)
        span = groups.amax(-1).clamp_min_(0) - low
    if shrink is not None:
        span = span * shrink
        low = None if low is None else low * shrink
    scale = storable(span / grid.steps, grid.scale_dtype)
    if low is None:
        return scale, None
    zero_point = (-low / scale.float()).round_().clamp_(*grid.bounds)
    return scale, zero_point


def storable(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales in their stored dtype; 0 becomes 1, and what would round to 0 the smallest normal number."""
    stored = torch.where(scale == 0, torch.ones_like(scale), scale).to(dtype)
    return torch.where(stored == 0, torch.full_like(stored, torch.finfo(dtype).tiny), stored)


def grouped(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """weight [N, K] → float32 [N, K/g, g]. Raises UsageError `not-quantisable`, DataError `group-size`."""
    if weight.ndim != 2 or not weight.is_floating_point():
        raise UsageError(
            "not-quantisable",
            f"a weight is {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}",
            why="expected a matrix [N, K] of floating-point numbers",
        )
    columns = weight.shape[1]
    width = grid.width(columns)
    if width < 1 or columns % width:
        raise DataError(
            "group-size",
            f"{columns} input features cannot be split into groups of {grid.group_size}",
            why="expected a group size that divides them",
            hint="deliver quantize chooses a smaller one per layer; or set --group-size",
        )
    return weight.float().reshape(weight.shape[0], columns // width, width)


def rounding_error(weight: torch.Tensor, grid: Grid, shrink: torch.Tensor | None = None) -> torch.Tensor:
    """Q(w) − w, float32 [N, K], without forming a QTensor: what a search evaluates many times over."""
    groups = grouped(weight, grid)
    scale, zero_point = parameters(groups, grid, shrink)
    step = scale.float()[..., None]
    low, high = grid.bounds
    values = (groups / step).round_()
    if zero_point is None:
        values.clamp_(low, high)
    else:
        # Bounds that are numbers: a clamp between tensors costs several times as much.
        shift = zero_point[..., None]
        values.add_(shift).clamp_(low, high).sub_(shift)
    return values.mul_(step).sub_(groups).reshape(weight.shape)


def check_finite(scale: torch.Tensor) -> None:
    """Raises DataError `weight-not-finite`; the driver adds the tensor's name."""
    if not bool(torch.isfinite(scale).all()):
        raise DataError(
            "weight-not-finite",
            "a weight has scales that are not finite",
            why=f"it holds NaN or infinity, or its range exceeds {scale.dtype}",
            hint="check the source checkpoint: deliver convert reports tensors that are not finite",
        )
