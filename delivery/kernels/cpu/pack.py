"""Packed weights of CPU programs: rows of whole 32-weight chunks in their stored format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from delivery.qtensor import QTensor

CHUNK = 32
_GROUP = 128  # of channel-wise 4-bit weights, which are repeated so that all of them have groups
_MOST_GROUP = 1 << 15
"""The largest group whose sums of products of 4 and 16 bits fit into the 8 lanes of 32 bits of few rows."""
_MOST_BYTES = 1 << 17
"""The most products of 8 bits whose sum fits into 32 bits."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BYTES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class PackedCpu:
    """A weight [N, K] for the CPU's linear layers.

    form: a name of the kinds of `layer`. data: [N, row] in the stored dtype, uint8 for 4 bits (byte i of a
    chunk's 16 holds weights i and i + 16). scale: float32 [N] of 8-bit rows; float16 or float32
    [N, groups] of 4-bit groups; None for floats. zero: uint8 [N, groups] or None.
    act_dtype, input_scale: how activations are quantised, if at all. order: int64 [K], the input
    features in group order (GPTQ act-order); None for stored order.
    """

    form: str
    data: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    shape: tuple[int, int]
    bias: torch.Tensor | None = None
    group_size: int = 0
    act_dtype: torch.dtype | None = None
    input_scale: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def row_bytes(self) -> int:
        return self.data.shape[1] * self.data.element_size()


def why_not_pack(weight: torch.Tensor | QTensor) -> str | None:
    """Why a weight has no CPU form of its own."""
    if isinstance(weight, torch.Tensor):
        return None if weight.dtype in _FLOATS else f"{weight.dtype} weights are not computed with"
    if weight.outliers is not None:
        return "outliers are kept apart, which no kernel reads"
    if weight.bits == 4 and weight.block_size is None and weight.act_dtype is None:
        if weight.group_size != -1 and weight.group_size % CHUNK:
            return f"group size {weight.group_size} is not a multiple of {CHUNK}"
        if weight.group_size > _MOST_GROUP:
            return f"sums over groups of {weight.group_size} do not fit into 32 bits"
        if weight.shape[1] % max(weight.group_size, CHUNK):
            return f"{weight.shape[1]} input features do not divide into whole groups"
        return None if weight.g_idx is None or _order(weight) is not None else "groups of unequal size"
    if weight.bits == 8 and weight.qdata.dtype in _BYTES:
        if weight.zero_point is not None or weight.g_idx is not None:
            return "8-bit weights with zero points are not computed with"
        if weight.block_size is not None or weight.scale.shape[1] != 1:
            return "8-bit weights have one scale per output feature here"
        if weight.act_dtype == torch.int8 and weight.shape[1] > _MOST_BYTES:
            return f"sums over {weight.shape[1]} input features do not fit into 32 bits"
        return None
    return f"{weight.bits}-bit weights of this kind are not computed with"


def pack(weight: torch.Tensor | QTensor, bias: torch.Tensor | None = None) -> PackedCpu:
    """The packed form of a weight for which `why_not_pack` is None; float weights are not copied."""
    bias = None if bias is None else bias.float().contiguous()
    if isinstance(weight, torch.Tensor):
        name = str(weight.dtype).removeprefix("torch.")
        return PackedCpu(name, _whole_chunks(weight), None, None, (weight.shape[0], weight.shape[1]), bias)
    if weight.bits == 4:
        return _pack4(weight, bias)
    return PackedCpu(
        str(weight.qdata.dtype).removeprefix("torch."),
        _whole_chunks(weight.qdata),
        weight.scale.float().expand(weight.shape[0], 1)[:, 0].contiguous(),
        None,
        weight.shape,
        bias,
        act_dtype=weight.act_dtype,
        input_scale=None if weight.input_scale is None else weight.input_scale.float().reshape(1),
    )


def _pack4(weight: QTensor, bias: torch.Tensor | None) -> PackedCpu:
    n, k = weight.shape
    order = _order(weight)
    values = weight.qdata if order is None else weight.qdata[:, order]
    zero = weight.zero_point
    if values.dtype == torch.int8:
        values = values + 8
        zero = torch.full_like(weight.scale, 8, dtype=torch.uint8)
    elif zero is None:
        zero = torch.zeros_like(weight.scale, dtype=torch.uint8)
    scale, group = weight.scale, weight.group_size
    if group == -1:
        group = next(g for g in (_GROUP, _GROUP // 2, CHUNK) if k % g == 0)
        scale, zero = (t.expand(n, 1).repeat(1, k // group) for t in (scale, zero))
    halves = values.to(torch.uint8).view(n, k // CHUNK, 2, CHUNK // 2)
    data = halves[:, :, 0] | (halves[:, :, 1] << 4)
    half = scale.half()
    exact = scale.dtype == torch.float16 or bool((half.float() == scale.float()).all())
    return PackedCpu(
        "w4_half" if exact else "w4_float",
        data.reshape(n, k // 2).contiguous(),
        (half if exact else scale.float()).contiguous(),
        zero.to(torch.uint8).contiguous(),
        (n, k),
        bias,
        group_size=group,
        order=order,
    )


def _whole_chunks(rows: torch.Tensor) -> torch.Tensor:
    """Rows with zeros up to whole chunks; the same tensor where they are whole already."""
    missing = -rows.shape[1] % CHUNK
    if missing == 0:
        return rows.contiguous()
    raw = rows.contiguous().view(torch.uint8).view(rows.shape[0], -1)
    padded = functional.pad(raw, (0, missing * rows.element_size()))
    return padded.view(rows.dtype)


def _order(weight: QTensor) -> torch.Tensor | None:
    """Input features sorted by group where `g_idx` shuffles them into groups of equal size."""
    if weight.g_idx is None:
        return None
    groups = weight.group_index()
    order = groups.argsort(stable=True)
    expected = torch.arange(weight.shape[1], device=groups.device) // weight.group_size
    return order if weight.group_size != -1 and torch.equal(groups[order], expected) else None
