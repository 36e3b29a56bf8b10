"""Quantised weights of all experts of a layer as one, for `fused_moe_quant`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from delivery.errors import DataError
from delivery.kernels.w8_layout import DTYPES
from delivery.qtensor import QTensor

TURN = 64
"""Input features of a 4-bit row that lie together: the first half in low nibbles, the second in high ones."""
HALF = TURN // 2
MIDDLE = 8
"""What is added to symmetric 4-bit values, −8 … 7, to store them."""


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Weights [E, N, K] of E experts.

    values: int8 or float8 [E, N, K]; in 4 bits uint8 [E, N, K / 2], see TURN. scale [E, N, K / group], in
    8 bits float32. zero_point: uint8 of that shape, or None for symmetric values. act_dtype: activations are
    quantised to it, one scale a token; None leaves them as they are.
    """

    values: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    bits: int
    group: int
    act_dtype: torch.dtype | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        count, rows, columns = self.values.shape
        return count, rows, columns * 8 // self.bits

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """[E, N, K] in `dtype`; the product is formed in float32, in float64 if asked for."""
        work = torch.float64 if dtype == torch.float64 else torch.float32
        values = self.values
        if self.bits == 4:
            pieces = values.view(*values.shape[:2], -1, HALF)
            values = torch.stack((pieces & 15, pieces >> 4), dim=-2).flatten(-3)
        grouped = values.to(work).view(*self.scale.shape, self.group)
        if self.zero_point is not None:
            grouped = grouped - self.zero_point.to(work)[..., None]
        elif self.bits == 4:
            grouped = grouped - MIDDLE
        wide: torch.Tensor = (grouped * self.scale.to(work)[..., None]).flatten(-2)
        return wide.to(dtype)


def why_not_pack(weights: Sequence[QTensor]) -> str | None:
    """Why `pack` cannot take weights [N, K], one an expert."""
    first = weights[0]
    if any(_kind(weight) != _kind(first) for weight in weights):
        return "experts are quantised in different ways"
    if any(w.outliers is not None or w.g_idx is not None or w.block_size is not None for w in weights):
        return "outliers, reordered features and block scales are read by other kernels only"
    if any(weight.input_scale is not None for weight in weights):
        return "activations have fixed scales"
    if first.bits == 8:
        return _why_not_8(first)
    if first.bits != 4 or first.qdata.dtype not in (torch.uint8, torch.int8) or first.act_dtype is not None:
        return f"expected 4 or 8 bits, got {first.bits} in {first.qdata.dtype}"
    group = first.shape[1] if first.group_size == -1 else first.group_size
    if group % TURN or first.shape[1] % group:
        return f"groups of {group} in {first.shape[1]} features are not multiples of {TURN}"
    return None


def _why_not_8(weight: QTensor) -> str | None:
    if weight.qdata.dtype not in DTYPES or weight.zero_point is not None or weight.scale.shape[1] != 1:
        return "8-bit weights are symmetric here, with one scale per output channel"
    if weight.act_dtype not in (None, weight.qdata.dtype):
        return f"activations in {weight.act_dtype} and weights in {weight.qdata.dtype}"
    return None


def pack(weights: Sequence[QTensor]) -> PackedExperts:
    """The experts' weights [N, K] as one. Raises DataError `unsupported-weight`."""
    if reason := why_not_pack(weights):
        raise DataError("unsupported-weight", "these experts have no packed form", why=reason)
    first = weights[0]
    rows, columns = first.shape
    scale = torch.stack([w.scale.expand(rows, -1) for w in weights]).contiguous()
    if first.bits == 8:
        values = torch.stack([w.qdata for w in weights])
        return PackedExperts(values, scale.float(), None, 8, columns, first.act_dtype)
    group = columns if first.group_size == -1 else first.group_size
    zeros = [w.zero_point.expand(rows, -1) for w in weights if w.zero_point is not None]
    zero_point = torch.stack(zeros).contiguous() if zeros else None
    if first.qdata.dtype == torch.uint8 and zero_point is None:
        zero_point = torch.zeros(scale.shape, dtype=torch.uint8, device=scale.device)
    values = torch.stack([_nibbles(w.qdata) for w in weights])
    return PackedExperts(values, scale, zero_point, 4, group)


def _nibbles(values: torch.Tensor) -> torch.Tensor:
    """[N, K] → uint8 [N, K / 2]."""
    stored = values if values.dtype == torch.uint8 else (values + MIDDLE).to(torch.uint8)
    halves = stored.view(len(stored), -1, 2, HALF)
    return torch.flatten(halves[:, :, 0] | halves[:, :, 1] << 4, 1)


def _kind(weight: QTensor) -> tuple[object, ...]:
    zero = weight.zero_point is None
    return weight.shape, weight.bits, weight.qdata.dtype, weight.group_size, weight.act_dtype, zero
