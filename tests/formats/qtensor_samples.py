"""Random QTensors for the tests of formats."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from delivery.qtensor import QTensor


def integers(
    rows: int,
    columns: int,
    group_size: int,
    bits: int,
    *,
    symmetric: bool,
    seed: int,
    shuffled: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> QTensor:
    """A weight-only QTensor whose scales are exact in `scale_dtype`."""
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if group_size == -1 else columns // group_size
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if symmetric else (0, 1 << bits)
    qdata = torch.randint(low, high, (rows, columns), generator=generator)
    zeros = torch.randint(0, 1 << bits, (rows, groups), generator=generator).to(torch.uint8)
    g_idx = None
    if shuffled:
        g_idx = (torch.arange(columns) // group_size)[torch.randperm(columns, generator=generator)]
    return QTensor(
        qdata=qdata.to(torch.int8 if symmetric else torch.uint8),
        scale=(torch.rand(rows, groups, generator=generator) + 0.01).to(scale_dtype),
        zero_point=None if symmetric else zeros,
        group_size=group_size,
        bits=bits,
        g_idx=None if g_idx is None else g_idx.to(torch.int32),
    )


def eight_bit(
    rows: int, columns: int, dtype: torch.dtype, granularity: str, seed: int, *, acts: bool = True
) -> QTensor:
    """An 8-bit QTensor; granularity: channel, tensor (with a static input scale) or block."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        qdata = torch.randint(-127, 128, (rows, columns), generator=generator).to(dtype)
    else:
        qdata = (torch.randn(rows, columns, generator=generator) * 50).to(dtype)
    shape = {"channel": (rows, 1), "tensor": (1, 1), "block": (-(-rows // 128), -(-columns // 128))}[
        granularity
    ]
    return QTensor(
        qdata=qdata,
        scale=torch.rand(shape, generator=generator) + 0.01,
        zero_point=None,
        group_size=-1,
        bits=8,
        input_scale=torch.tensor([0.25]) if granularity == "tensor" else None,
        act_dtype=dtype if acts else None,
        block_size=128 if granularity == "block" else None,
    )


seeds = st.integers(0, 2**31)
groupings = st.sampled_from([(8, -1), (8, 8), (32, 16), (64, 32), (96, 32), (40, 8)])
"""(input features, group size)"""
