"""Integers as formats store them: unsigned, and packed into 32-bit words, least significant bits first."""

from __future__ import annotations

import torch

from delivery.qtensor import QTensor

PACKABLE = (2, 4, 8)


def pack_last(values: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., C] with values under 2^bits → int32 [..., ceil(C · bits / 32)]; the rest is zero.

    Value i lies in bits i·bits .. i·bits + bits − 1 of its row. bits: 2, 4 or 8.
    """
    per_byte = 8 // bits
    missing = -values.shape[-1] % (32 // bits)
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    packed = values[..., 0::per_byte]
    for slot in range(1, per_byte):
        packed = packed | (values[..., slot::per_byte] << (slot * bits))
    return packed.reshape(-1).view(torch.int32).reshape(*packed.shape[:-1], -1)


def unpack_last(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [..., W] → uint8 [..., count]; the reverse of `pack_last`."""
    octets = words.reshape(-1).view(torch.uint8).reshape(*words.shape[:-1], -1)
    if bits == 8:
        return octets[..., :count].contiguous()
    mask = (1 << bits) - 1
    slots = [(octets >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(slots, -1).flatten(-2)[..., :count].contiguous()


def zero_points(q: QTensor) -> torch.Tensor:
    """uint8 zero points of the shape of `scale`; the middle of the range where `q` is symmetric."""
    if q.zero_point is not None:
        return q.zero_point
    return torch.full(q.scale.shape, 1 << (q.bits - 1), dtype=torch.uint8, device=q.qdata.device)


def unsigned(q: QTensor) -> torch.Tensor:
    """qdata as uint8 0 .. 2^bits − 1; symmetric values are shifted by half the range."""
    if q.qdata.dtype == torch.uint8:
        return q.qdata
    return (q.qdata.to(torch.int16) + (1 << (q.bits - 1))).to(torch.uint8)


def signed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The reverse of `unsigned`: int8."""
    return (values.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
