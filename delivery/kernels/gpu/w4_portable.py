"""4-bit weights in plain Triton: expansion to a dense weight, and a product for any card and any stride.

Both read the packed words (w4_layout.py) as they are. `expanded` feeds cuBLAS for many rows: it moves the
words once and writes 16 bits a weight. `product` is the fallback where w4_hopper.py cannot run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from delivery.kernels.w4_layout import PackedW4


@triton.jit
def _nibbles(words, BLOCK_N: tl.constexpr):
    """int32 words [BLOCK_N / 2, 32] of one tile → values 0..15 [BLOCK_N, 128]."""
    v0, v1, v2, v3 = words & 15, (words >> 4) & 15, (words >> 8) & 15, (words >> 12) & 15
    v4, v5, v6, v7 = (words >> 16) & 15, (words >> 20) & 15, (words >> 24) & 15, (words >> 28) & 15
    values = tl.join(tl.join(tl.join(v0, v1), tl.join(v2, v3)), tl.join(tl.join(v4, v5), tl.join(v6, v7)))
    # rows (n7..n4, k6, n2 n1), columns (n0, k2 k1, k5, k4), then n3, k3, k0
    values = tl.reshape(values, [BLOCK_N // 16, 2, 4, 2, 4, 2, 2, 2, 2, 2])
    values = tl.permute(values, [0, 7, 2, 3, 1, 5, 6, 8, 4, 9])
    return tl.reshape(values, [BLOCK_N, 128])


@triton.jit
def _tile(
    words,
    scale,
    zero_point,
    n0,
    step,
    steps,
    n_padded,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Output features n0 .. n0 + BLOCK_N, input features of `step`: float32 [BLOCK_N, 128]."""
    PER_TILE: tl.constexpr = 256 // BLOCK_N
    block = n0 // BLOCK_N
    first_row = ((block // PER_TILE).to(tl.int64) * steps + step) * 128 + block % PER_TILE * (BLOCK_N // 2)
    row = first_row + tl.arange(0, BLOCK_N // 2)
    packed = tl.load(words + row[:, None] * 32 + tl.arange(0, 32)[None, :])
    values = _nibbles(packed, BLOCK_N).to(tl.float32)
    GROUPS: tl.constexpr = 128 // GROUP
    at = (step * GROUPS + tl.arange(0, GROUPS)).to(tl.int64)[None, :] * n_padded
    at += n0 + tl.arange(0, BLOCK_N)[:, None]
    s = tl.load(scale + at).to(tl.float32)
    z = tl.load(zero_point + at).to(tl.float32) if ZERO else tl.full([BLOCK_N, GROUPS], 8.0, tl.float32)
    values = (tl.reshape(values, [BLOCK_N, GROUPS, GROUP]) - z[:, :, None]) * s[:, :, None]
    return tl.reshape(values, [BLOCK_N, 128])


@triton.jit
def _expand(
    words,
    scale,
    zero_point,
    out,
    N,
    K,
    steps,
    n_padded,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
):
    step = tl.program_id(0)
    n0 = tl.program_id(1) * BLOCK_N
    values = _tile(words, scale, zero_point, n0, step, steps, n_padded, BLOCK_N, GROUP, ZERO)
    n = (n0 + tl.arange(0, BLOCK_N))[:, None]
    k = (step * 128 + tl.arange(0, 128))[None, :]
    tl.store(out + n.to(tl.int64) * K + k, values.to(out.dtype.element_ty), mask=(n < N) & (k < K))


@triton.jit
def _product(
    x,
    words,
    scale,
    zero_point,
    bias,
    out,
    M,
    N,
    K,
    x_stride,
    steps,
    n_padded,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
):
    n0 = tl.program_id(0) * BLOCK_N
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n0 + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(steps):
        k = step * 128 + tl.arange(0, 128)
        where = m.to(tl.int64)[:, None] * x_stride + k[None, :]
        rows = tl.load(x + where, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        values = _tile(words, scale, zero_point, n0, step, steps, n_padded, BLOCK_N, GROUP, ZERO)
        total = tl.dot(rows, tl.trans(values.to(rows.dtype)), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    where = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def expanded(packed: PackedW4, dtype: torch.dtype) -> torch.Tensor:
    """The dense weight [N, K] of `dtype`, its input features in the order of `packed.order`."""
    n, k = packed.shape
    steps = packed.words.shape[1]
    out = torch.empty(n, k, dtype=dtype, device=packed.words.device)
    block = 64
    _expand[(steps, triton.cdiv(n, block))](
        packed.words,
        packed.scale,
        packed.scale if packed.zero_point is None else packed.zero_point,
        out,
        n,
        k,
        steps,
        packed.scale.shape[1],
        BLOCK_N=block,
        GROUP=packed.group_size,
        ZERO=packed.zero_point is not None,
        num_warps=4,
    )
    return out


def product(x: torch.Tensor, packed: PackedW4, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, K] · weightᵀ + bias, for x whose last axis is contiguous, already in the order of `packed`."""
    rows, (n, k) = x.shape[0], packed.shape
    steps = packed.words.shape[1]
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    block_n = 32 if rows <= 16 else 64
    if rows:
        _product[(triton.cdiv(n, block_n), triton.cdiv(rows, block_m))](
            x,
            packed.words,
            packed.scale,
            packed.scale if packed.zero_point is None else packed.zero_point,
            out if bias is None else bias,
            out,
            rows,
            n,
            k,
            x.stride(0),
            steps,
            packed.scale.shape[1],
            BLOCK_N=block_n,
            BLOCK_M=block_m,
            GROUP=packed.group_size,
            ZERO=packed.zero_point is not None,
            BIAS=bias is not None,
            num_warps=4,
        )
    return out
