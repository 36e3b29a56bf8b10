"""Per-head norm, rotation and cache write: one launch for q, k and v of a step.

Heads that turn whole, as two halves, have a kernel of their own (rope_halves.py). The one here takes the
others: features in neighbouring pairs, heads that turn in part, widths that are no power of two. A program
takes a few heads of one token. Programs of queries rotate in place; programs of keys and values rotate,
quantise and write to the cache. Bytes: q and k read and written, v read, cache written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from delivery.kernels.gpu.norms import TRITON_DTYPE
from delivery.kernels.gpu.overlap import gdc_launch_dependents, gdc_wait, overlaps
from delivery.kernels.gpu.rope_halves import write_halves
from delivery.kernels.gpu.rounding import round_even, to_quantised
from delivery.kernels.kv_layout import layout_of
from delivery.kernels.row_quant import Q_MAX, TINY


@triton.jit
def _rstd(x, head, valid, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, eps):
    """1 / rms of each head [H, 1]."""
    column = tl.arange(0, BLOCK)[None, :]
    value = tl.load(x + head * HEAD_DIM + column, mask=valid & (column < HEAD_DIM), other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(value * value, axis=1) / HEAD_DIM + eps)[:, None]


@triton.jit
def _rotated(
    x,
    head,
    column,
    valid,
    cos,
    sin,
    norm,
    rstd,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """Features `column` [1, D] of heads `head` [H, 1], normed and rotated: float32 [H, D]."""
    turns = column < 2 * HALF
    if INTERLEAVED:
        partner = tl.where(turns, column ^ 1, column)
        angle = column // 2
        first = (column & 1) == 0
    else:
        partner = tl.where(turns, tl.where(column < HALF, column + HALF, column - HALF), column)
        angle = tl.where(column < HALF, column, column - HALF)
        first = column < HALF
    inside = valid & (column < HEAD_DIM)
    value = tl.load(x + head * HEAD_DIM + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + head * HEAD_DIM + partner, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        here = tl.load(norm + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
        there = tl.load(norm + partner, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
        if PLUS_ONE:
            here += 1.0
            there += 1.0
        value *= rstd * here
        other *= rstd * there
    c = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
    return value * c + other * tl.where(first, -s, s)


@triton.jit
def _write(
    low,
    high,
    cache,
    scales,
    block,
    offset,
    head,
    column,
    valid,
    value_stride,
    scale_stride,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    STORED_DIM: tl.constexpr,
    LAYOUT: tl.constexpr,
    Q_MAX: tl.constexpr,
    TINY: tl.constexpr,
):
    """One token's features [H, D] (and for int4 the head's second half) to the cache, quantised."""
    address = cache + block * value_stride + offset * TOKEN_STRIDE + head * HEAD_STRIDE + column
    inside = valid & (column < STORED_DIM)
    one = head < KV_HEADS
    if LAYOUT == "auto":
        tl.store(address, low.to(cache.dtype.element_ty), mask=inside)
    elif LAYOUT == "int4":
        least = tl.minimum(
            tl.min(tl.where(inside, low, float("inf")), axis=1),
            tl.min(tl.where(inside, high, float("inf")), axis=1),
        )[:, None]
        most = tl.maximum(
            tl.max(tl.where(inside, low, float("-inf")), axis=1),
            tl.max(tl.where(inside, high, float("-inf")), axis=1),
        )[:, None]
        scale = tl.maximum((most - least) / 15.0, TINY)
        first = tl.minimum(tl.maximum(round_even((low - least) / scale), 0.0), 15.0)
        second = tl.minimum(tl.maximum(round_even((high - least) / scale), 0.0), 15.0)
        packed = first.to(tl.int32) | (second.to(tl.int32) << 4)
        tl.store(address, packed.to(tl.uint8), mask=inside)
        scale_at = scales + block * scale_stride + offset
        tl.store(scale_at + head * 2 * BLOCK_SIZE, scale, mask=one)
        tl.store(scale_at + (head * 2 + 1) * BLOCK_SIZE, least, mask=one)
    else:
        most = tl.max(tl.where(inside, tl.abs(low), 0.0), axis=1)[:, None]
        scale = tl.maximum(most, TINY) / Q_MAX
        tl.store(address, to_quantised(low / scale, Q_MAX, cache.dtype.element_ty), mask=inside)
        tl.store(scales + block * scale_stride + head * BLOCK_SIZE + offset, scale, mask=one)


@triton.jit
def _rope_cache_write(
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
    HEADS: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STORED_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    LAYOUT: tl.constexpr,
    Q_MAX: tl.constexpr,
    TINY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if OVERLAP:
        gdc_wait()
    part = tl.program_id(1)
    cos += token * angle_stride
    sin += token * angle_stride
    rows = tl.arange(0, TILE)[:, None]
    query_parts: tl.constexpr = (HEADS + TILE - 1) // TILE
    if part < query_parts:
        rstd = 1.0
        head = part * TILE + rows
        valid = head < HEADS
        x = q + token * q_stride
        whole = tl.arange(0, WIDTH)[None, :]
        if NORM:
            rstd = _rstd(x, head, valid, HEAD_DIM, WIDTH, eps)
        turned = _rotated(
            x, head, whole, valid, cos, sin, q_norm, rstd, HEAD_DIM, HALF, INTERLEAVED, NORM, PLUS_ONE
        )
        tl.debug_barrier()  # every thread has read its partners before any of them is overwritten
        inside = valid & (whole < HEAD_DIM)
        tl.store(x + head * HEAD_DIM + whole, turned.to(q.dtype.element_ty), mask=inside)
    else:
        rstd = 1.0
        head = (part - query_parts) * TILE + rows
        valid = head < KV_HEADS
        x = k + token * k_stride
        if NORM:
            rstd = _rstd(x, head, valid, HEAD_DIM, WIDTH, eps)
        column = tl.arange(0, COLUMNS)[None, :]
        stored = valid & (column < STORED_DIM)
        low = _rotated(
            x, head, column, stored, cos, sin, k_norm, rstd, HEAD_DIM, HALF, INTERLEAVED, NORM, PLUS_ONE
        )
        low = low.to(k.dtype.element_ty)
        high = low
        if LAYOUT == "int4":
            beyond = column + STORED_DIM
            high = _rotated(
                x, head, beyond, stored, cos, sin, k_norm, rstd, HEAD_DIM, HALF, INTERLEAVED, NORM, PLUS_ONE
            ).to(k.dtype.element_ty)
        tl.debug_barrier()
        tl.store(x + head * HEAD_DIM + column, low, mask=stored)
        if LAYOUT == "int4":
            tl.store(x + head * HEAD_DIM + column + STORED_DIM, high, mask=stored)
        if slot >= 0:
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            _write(
                low.to(tl.float32), high.to(tl.float32), k_cache, k_scale, block, offset, head, column, valid,
                value_stride, scale_stride, BLOCK_SIZE, TOKEN_STRIDE, HEAD_STRIDE, KV_HEADS, STORED_DIM,
                LAYOUT, Q_MAX, TINY,
            )  # fmt: skip
            at = v + token * v_stride + head * HEAD_DIM + column
            v_low = tl.load(at, mask=stored, other=0.0).to(tl.float32)
            v_high = v_low
            if LAYOUT == "int4":
                v_high = tl.load(at + STORED_DIM, mask=stored, other=0.0).to(tl.float32)
            _write(
                v_low, v_high, v_cache, v_scale, block, offset, head, column, valid,
                value_stride, scale_stride, BLOCK_SIZE, TOKEN_STRIDE, HEAD_STRIDE, KV_HEADS, STORED_DIM,
                LAYOUT, Q_MAX, TINY,
            )  # fmt: skip


def rope_cache_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    interleaved: bool = False,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `delivery.kernels.rope_cache_write`. The features of a head, and its heads, lie side by side."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    layout = layout_of(k_cache)
    stored_dim = layout.stored_dim(head_dim)
    if not tokens:
        return q, k
    if not interleaved and 2 * cos.shape[1] == head_dim and head_dim & (head_dim - 1) == 0:
        norms = (q_norm, k_norm, eps, plus_one)
        write_halves(q, k, v, cos, sin, slot_mapping, k_cache, v_cache, k_scale, v_scale, *norms)
        return q, k
    overlap = overlaps(q.device)
    tile = 4
    parts = triton.cdiv(heads, tile) + triton.cdiv(kv_heads, tile)
    _rope_cache_write[(tokens, parts)](
        q, k, v, cos, sin, slot_mapping, k_cache, v_cache, k_scale, v_scale, q_norm, k_norm,
        q.stride(0), k.stride(0), v.stride(0), cos.stride(0), k_cache.stride(0),
        0 if k_scale is None else k_scale.stride(0), eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        TOKEN_STRIDE=k_cache.stride(1),
        HEAD_STRIDE=k_cache.stride(2),
        HEAD_DIM=head_dim,
        STORED_DIM=stored_dim,
        HALF=cos.shape[1],
        BLOCK_SIZE=k_cache.shape[1],
        TILE=tile,
        COLUMNS=triton.next_power_of_2(stored_dim),
        WIDTH=triton.next_power_of_2(head_dim),
        INTERLEAVED=interleaved,
        NORM=q_norm is not None,
        PLUS_ONE=plus_one,
        LAYOUT=layout.name,
        Q_MAX=Q_MAX[k_cache.dtype] if k_cache.dtype in TRITON_DTYPE else 0.0,
        TINY=TINY,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=2,
    )  # fmt: skip
    return q, k
