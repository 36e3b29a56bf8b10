"""The inner loop of the prefill kernel: a span of keys folded into the running sums of a tile of queries."""

from __future__ import annotations

import triton
import triton.language as tl

from delivery.kernels.gpu.pages import (
    base2_factor,
    block_of,
    capped,
    load_scale,
    load_tile,
    nibbles,
    offset_of,
)


@triton.jit
def attend_span(
    query,
    query_high,
    query_sum,
    sums,
    sums_high,
    extra,
    most,
    weight,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    table,
    length,
    query_position,
    head,
    begin,
    end,
    k_stride,
    v_stride,
    scale_stride,
    scale,
    softcap,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    STORED_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    RAGGED: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Folds keys begin .. end − 1 into the running sums.

    MASKED: rows may not see all of them. RAGGED: the cache may hold less than the last tile reads.
    """
    dtype: tl.constexpr = query.dtype
    exact: tl.constexpr = WIDTH == STORED_DIM
    rows = tl.arange(0, TILE)
    columns = tl.arange(0, WIDTH)
    factor = base2_factor(scale, softcap, SOFTCAP)
    block = block_of(table, begin, rows, length, PAGE, TILE)
    for first in tl.range(begin, end, TILE, num_stages=STAGES):
        position = first + rows
        keep = position < length
        offset = offset_of(first, rows, PAGE, TILE)
        if TMA:
            line = block * PAGE + first % PAGE
            k = k_cache.load([line, head * STORED_DIM])
        else:
            k = load_tile(
                k_cache,
                block,
                offset,
                columns,
                keep,
                k_stride,
                head,
                TOKEN_STRIDE,
                HEAD_STRIDE,
                STORED_DIM,
                exact,
                False,
            )
        if LAYOUT == "int4":
            k_low, k_high = nibbles(k, dtype)
            scores = tl.dot(query, tl.trans(k_low), input_precision=PRECISION)
            scores = tl.dot(query_high, tl.trans(k_high), scores, input_precision=PRECISION)
            step = load_scale(k_scale, block, offset, keep, scale_stride, head, 0, 2, PAGE)
            least = load_scale(k_scale, block, offset, keep, scale_stride, head, 1, 2, PAGE)
            scores = scores * step[None, :] + query_sum[:, None] * least[None, :]
        else:
            scores = tl.dot(query, tl.trans(k.to(dtype)), input_precision=PRECISION)
            if LAYOUT != "auto":
                step = load_scale(k_scale, block, offset, keep, scale_stride, head, 0, 1, PAGE)
                scores *= step[None, :]
        scores = capped(scores, scale, softcap, SOFTCAP)
        if MASKED:
            seen = position[None, :] <= query_position[:, None]
            if WINDOW > 0:
                seen = seen & (position[None, :] > query_position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1) * factor)
        fade = tl.exp2(most - larger)
        share = tl.exp2(scores * factor - larger[:, None])
        weight = weight * fade + tl.sum(share, 1)
        most = larger
        sums *= fade[:, None]
        if TMA:
            v = v_cache.load([line, head * STORED_DIM])
            if RAGGED:
                v = tl.where(keep[:, None], v, 0.0)
        else:
            v = load_tile(
                v_cache,
                block,
                offset,
                columns,
                keep,
                v_stride,
                head,
                TOKEN_STRIDE,
                HEAD_STRIDE,
                STORED_DIM,
                exact,
                RAGGED,
            )
        if LAYOUT == "int4":
            step = load_scale(v_scale, block, offset, keep, scale_stride, head, 0, 2, PAGE)
            least = load_scale(v_scale, block, offset, keep, scale_stride, head, 1, 2, PAGE)
            extra = extra * fade + tl.sum(share * least[None, :], 1)
            share = (share * step[None, :]).to(dtype)
            v_low, v_high = nibbles(v, dtype)
            sums = tl.dot(share, v_low, sums, input_precision=PRECISION)
            sums_high = tl.dot(share, v_high, sums_high * fade[:, None], input_precision=PRECISION)
        else:
            if LAYOUT != "auto":
                step = load_scale(v_scale, block, offset, keep, scale_stride, head, 0, 1, PAGE)
                share *= step[None, :]
            sums = tl.dot(share.to(dtype), v.to(dtype), sums, input_precision=PRECISION)
        block = block_of(table, first + TILE, rows, length, PAGE, TILE)
    return sums, sums_high, extra, most, weight
