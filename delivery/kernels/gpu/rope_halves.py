"""Rotation and cache write of heads that turn whole, feature j with feature j + head_dim / 2 (NeoX).

A program takes some kv heads of one token with their query heads, in prompts all of them. A thread holds
both features of every pair it turns, so each value is read once, 16 bytes at a time, and written where it
was read. The program's loads do not depend on one another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from delivery.kernels.gpu.norms import TRITON_DTYPE
from delivery.kernels.gpu.overlap import gdc_launch_dependents, gdc_wait, overlaps
from delivery.kernels.gpu.rounding import round_even, to_quantised
from delivery.kernels.kv_layout import layout_of
from delivery.kernels.row_quant import Q_MAX, TINY

MANY = 512
"""Tokens from which on there are programs enough when each takes all heads of a token."""


@triton.jit
def _turned(
    x,
    head,
    valid,
    c,
    s,
    norm,
    eps,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """(first, second halves) of heads `head` [H, 1] of x, normed and rotated: float32 [H, HEAD_DIM / 2]."""
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, HALF)[None, :]
    low = tl.load(x + head * HEAD_DIM + column, mask=valid, other=0.0).to(tl.float32)
    high = tl.load(x + head * HEAD_DIM + HALF + column, mask=valid, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        rstd = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        low_weight = tl.load(norm + column).to(tl.float32)
        high_weight = tl.load(norm + HALF + column).to(tl.float32)
        if PLUS_ONE:
            low_weight += 1.0
            high_weight += 1.0
        low *= rstd * low_weight
        high *= rstd * high_weight
    return low * c - high * s, high * c + low * s


@triton.jit
def _store(
    low,
    high,
    cache,
    scales,
    block,
    offset,
    head,
    valid,
    value_stride,
    scale_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    LAYOUT: tl.constexpr,
    Q_MAX: tl.constexpr,
    TINY: tl.constexpr,
):
    """Halves [H, HEAD_DIM / 2] of one token's heads to the cache, quantised."""
    HALF: tl.constexpr = HEAD_DIM // 2
    at = (
        cache
        + block * value_stride
        + offset * TOKEN_STRIDE
        + head * HEAD_STRIDE
        + tl.arange(0, HALF)[None, :]
    )
    if LAYOUT == "auto":
        tl.store(at, low.to(cache.dtype.element_ty), mask=valid)
        tl.store(at + HALF, high.to(cache.dtype.element_ty), mask=valid)
    elif LAYOUT == "int4":
        least = tl.min(tl.minimum(low, high), axis=1)[:, None]
        most = tl.max(tl.maximum(low, high), axis=1)[:, None]
        scale = tl.maximum((most - least) / 15.0, TINY)
        first = tl.minimum(tl.maximum(round_even((low - least) / scale), 0.0), 15.0)
        second = tl.minimum(tl.maximum(round_even((high - least) / scale), 0.0), 15.0)
        packed = first.to(tl.int32) | (second.to(tl.int32) << 4)
        tl.store(at, packed.to(tl.uint8), mask=valid)
        scale_at = scales + block * scale_stride + head * (2 * BLOCK_SIZE) + offset
        tl.store(scale_at, scale, mask=valid)
        tl.store(scale_at + BLOCK_SIZE, least, mask=valid)
    else:
        most = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)[:, None]
        scale = tl.maximum(most, TINY) / Q_MAX
        tl.store(at, to_quantised(low / scale, Q_MAX, cache.dtype.element_ty), mask=valid)
        tl.store(at + HALF, to_quantised(high / scale, Q_MAX, cache.dtype.element_ty), mask=valid)
        tl.store(scales + block * scale_stride + head * BLOCK_SIZE + offset, scale, mask=valid)


@triton.jit
def _rope_halves(
    q,
    k,
    v,
    cos,
    sin,
    slot_mapping,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    q_norm,
    k_norm,
    q_stride,
    k_stride,
    v_stride,
    angle_stride,
    value_stride,
    scale_stride,
    eps,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_TILE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    LAYOUT: tl.constexpr,
    Q_MAX: tl.constexpr,
    TINY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) * KV_TILE + tl.arange(0, KV_TILE)[:, None]
    stored = kv_head < KV_HEADS
    row = tl.arange(0, QUERY_TILE)[:, None]
    head = tl.program_id(1) * (KV_TILE * GROUP) + row
    asked = (row < KV_TILE * GROUP) & (head < KV_HEADS * GROUP)
    column = tl.arange(0, HALF)[None, :]
    slot = tl.load(slot_mapping + token)
    if OVERLAP:
        gdc_wait()
    c = tl.load(cos + token * angle_stride + column)
    s = tl.load(sin + token * angle_stride + column)
    q += token * q_stride
    k += token * k_stride
    v += token * v_stride
    v_low = tl.load(v + kv_head * HEAD_DIM + column, mask=stored, other=0.0)
    v_high = tl.load(v + kv_head * HEAD_DIM + HALF + column, mask=stored, other=0.0)
    low, high = _turned(k, kv_head, stored, c, s, k_norm, eps, HEAD_DIM, NORM, PLUS_ONE)
    q_low, q_high = _turned(q, head, asked, c, s, q_norm, eps, HEAD_DIM, NORM, PLUS_ONE)
    tl.store(q + head * HEAD_DIM + column, q_low.to(q.dtype.element_ty), mask=asked)
    tl.store(q + head * HEAD_DIM + HALF + column, q_high.to(q.dtype.element_ty), mask=asked)
    low = low.to(k.dtype.element_ty)
    high = high.to(k.dtype.element_ty)
    tl.store(k + kv_head * HEAD_DIM + column, low, mask=stored)
    tl.store(k + kv_head * HEAD_DIM + HALF + column, high, mask=stored)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        _store(
            low.to(tl.float32), high.to(tl.float32), k_cache, k_scale, block, offset, kv_head, stored,
            value_stride, scale_stride, HEAD_DIM, BLOCK_SIZE, TOKEN_STRIDE, HEAD_STRIDE, LAYOUT, Q_MAX, TINY,
        )  # fmt: skip
        _store(
            v_low.to(tl.float32), v_high.to(tl.float32), v_cache, v_scale, block, offset, kv_head, stored,
            value_stride, scale_stride, HEAD_DIM, BLOCK_SIZE, TOKEN_STRIDE, HEAD_STRIDE, LAYOUT, Q_MAX, TINY,
        )  # fmt: skip


def write_halves(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    plus_one: bool,
) -> None:
    """What `rope_cache_write` does; cos, sin [T, head_dim / 2], head_dim a power of two."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    kv_tile = triton.next_power_of_2(kv_heads) if tokens >= MANY else 1
    query_tile = triton.next_power_of_2(kv_tile * group)
    overlap = overlaps(q.device)
    _rope_halves[(tokens, triton.cdiv(kv_heads, kv_tile))](
        q, k, v, cos, sin, slot_mapping, k_cache, v_cache, k_scale, v_scale, q_norm, k_norm,
        q.stride(0), k.stride(0), v.stride(0), cos.stride(0), k_cache.stride(0),
        0 if k_scale is None else k_scale.stride(0), eps,
        GROUP=group,
        KV_HEADS=kv_heads,
        KV_TILE=kv_tile,
        QUERY_TILE=query_tile,
        TOKEN_STRIDE=k_cache.stride(1),
        HEAD_STRIDE=k_cache.stride(2),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        NORM=q_norm is not None,
        PLUS_ONE=plus_one,
        LAYOUT=layout_of(k_cache).name,
        Q_MAX=Q_MAX[k_cache.dtype] if k_cache.dtype in TRITON_DTYPE else 0.0,
        TINY=TINY,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=min(8, max(1, query_tile * head_dim // 1024)),
    )  # fmt: skip
