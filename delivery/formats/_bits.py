"""Packing of small unsigned integers into 32-bit words, least significant bits first, without loops."""

from __future__ import annotations

import torch

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
