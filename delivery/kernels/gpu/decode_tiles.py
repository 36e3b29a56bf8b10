"""Parts of the decode kernel: the tiles of one pair, its query and result rows, the merge of its pieces."""

from __future__ import annotations

import triton
import triton.language as tl

from delivery.kernels.gpu.packed import halves, quarters
from delivery.kernels.gpu.pages import (
    LOWEST,
    base2_factor,
    block_of,
    capped,
    load_scale,
    load_tile,
    offset_of,
)


@triton.jit
def attend(
    q0,
    q1,
    q2,
    q3,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    table,
    length,
    head,
    first_tile,
    last_tile,
    k_stride,
    v_stride,
    scale_stride,
    scale,
    softcap,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(sums of each part, maximum, weight) over the tiles first_tile .. last_tile − 1.

    The parts of a head (one for a plain cache, see `packed`) multiply one after another. Weights of
    quantised values carry the value's scale, taken relative to the largest one so far, `reach`: they stay
    within 0 .. 1, where fp16 is at home.
    """
    dtype: tl.constexpr = q0.dtype
    exact: tl.constexpr = WIDTH == WORDS
    parts: tl.constexpr = 2 if LAYOUT == "int4" else 1  # scales of a token: one, or step and least
    more: tl.constexpr = 1 if LAYOUT == "auto" else WIDTH
    most_parts: tl.constexpr = WIDTH if LAYOUT == "int4" else 1
    rows = tl.arange(0, TILE)
    columns = tl.arange(0, WIDTH)
    sums0 = tl.zeros((ROWS, WIDTH), tl.float32)
    sums1 = tl.zeros((ROWS, more), tl.float32)
    sums2 = tl.zeros((ROWS, most_parts), tl.float32)
    sums3 = tl.zeros((ROWS, most_parts), tl.float32)
    extra = tl.zeros((ROWS,), tl.float32)
    most = tl.full((ROWS,), LOWEST, tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    reach = 1e-30
    if LAYOUT == "int4":
        query_sum = tl.sum(q0.to(tl.float32) + q1.to(tl.float32) + q2.to(tl.float32) + q3.to(tl.float32), 1)
    factor = base2_factor(scale, softcap, SOFTCAP)
    block = block_of(table, first_tile * TILE, rows, length, PAGE, TILE)
    for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
        position = tile * TILE + rows
        keep = position < length
        offset = offset_of(tile * TILE, rows, PAGE, TILE)
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
            WORDS,
            exact,
            False,
        )
        k = tl.trans(k)
        if LAYOUT == "auto":
            scores = tl.dot(q0, k, input_precision=PRECISION)
        elif LAYOUT == "int4":
            k0, k1, k2, k3 = quarters(k, dtype)
            scores = tl.dot(q0, k0, input_precision=PRECISION)
            scores = tl.dot(q1, k1, scores, input_precision=PRECISION)
            scores = tl.dot(q2, k2, scores, input_precision=PRECISION)
            scores = tl.dot(q3, k3, scores, input_precision=PRECISION)
            step = load_scale(k_scale, block, offset, keep, scale_stride, head, 0, 2, PAGE)
            least = load_scale(k_scale, block, offset, keep, scale_stride, head, 1, 2, PAGE)
            scores = scores * step[None, :] + query_sum[:, None] * least[None, :]
        else:
            k0, k1 = halves(k, LAYOUT, dtype)
            scores = tl.dot(q0, k0, input_precision=PRECISION)
            scores = tl.dot(q1, k1, scores, input_precision=PRECISION)
            scores *= load_scale(k_scale, block, offset, keep, scale_stride, head, 0, 1, PAGE)[None, :]
        scores = capped(scores, scale, softcap, SOFTCAP)
        seen = keep
        if WINDOW > 0:
            seen = keep & (position >= length - WINDOW)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1) * factor)
        fade = tl.exp2(most - larger)
        share = tl.exp2(scores * factor - larger[:, None])
        weight = weight * fade + tl.sum(share, 1)
        most = larger
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
            WORDS,
            exact,
            True,
        )
        if LAYOUT == "auto":
            sums0 = tl.dot(share.to(dtype), v, sums0 * fade[:, None], input_precision=PRECISION)
        else:
            step = load_scale(v_scale, block, offset, keep, scale_stride, head, 0, parts, PAGE)
            if LAYOUT == "int4":
                least = load_scale(v_scale, block, offset, keep, scale_stride, head, 1, 2, PAGE)
                extra = extra * fade + tl.sum(share * least[None, :], 1)
            farther = tl.maximum(reach, tl.max(step, 0))
            fade *= reach / farther
            reach = farther
            share = (share * (step / farther)[None, :]).to(dtype)
            if LAYOUT == "int4":
                v0, v1, v2, v3 = quarters(v, dtype)
                sums2 = tl.dot(share, v2, sums2 * fade[:, None], input_precision=PRECISION)
                sums3 = tl.dot(share, v3, sums3 * fade[:, None], input_precision=PRECISION)
            else:
                v0, v1 = halves(v, LAYOUT, dtype)
            sums0 = tl.dot(share, v0, sums0 * fade[:, None], input_precision=PRECISION)
            sums1 = tl.dot(share, v1, sums1 * fade[:, None], input_precision=PRECISION)
        block = block_of(table, (tile + 1) * TILE, rows, length, PAGE, TILE)
    if LAYOUT != "auto":
        sums0 = sums0 * reach + extra[:, None]
        sums1 = sums1 * reach + extra[:, None]
        sums2 = sums2 * reach + extra[:, None]
        sums3 = sums3 * reach + extra[:, None]
    return sums0, sums1, sums2, sums3, most, weight


@triton.jit
def load_pair(base, row, words, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Even and odd features [ROWS, WIDTH] of neighbouring ones at `base`; 0 past `words`."""
    feature = tl.arange(0, 2 * WIDTH)
    inside = (row >= 0)[:, None] & (feature < 2 * words)[None, :]
    both = tl.load(base + row[:, None] * HEAD_DIM + feature[None, :], mask=inside, other=0.0)
    return tl.split(tl.reshape(both, (ROWS, WIDTH, 2)))


@triton.jit
def _store_pair(base, row, words, even, odd, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The inverse of `load_pair`, in the dtype of `base`."""
    feature = tl.arange(0, 2 * WIDTH)
    inside = (row >= 0)[:, None] & (feature < 2 * words)[None, :]
    both = tl.reshape(tl.join(even, odd), (ROWS, 2 * WIDTH)).to(base.dtype.element_ty)
    tl.store(base + row[:, None] * HEAD_DIM + feature[None, :], both, mask=inside)


@triton.jit
def store(
    base,
    row,
    s0,
    s1,
    s2,
    s3,
    share,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Writes all parts times `share` [rows, 1]; rows below 0 are left out."""
    if LAYOUT == "auto":
        lane = tl.arange(0, WIDTH)
        inside = (row >= 0)[:, None] & (lane < WORDS)[None, :]
        at = base + row[:, None] * HEAD_DIM + lane[None, :]
        tl.store(at, (s0 * share).to(base.dtype.element_ty), mask=inside)
    elif LAYOUT == "int4":
        _store_pair(base, row, WORDS, s0 * share, s2 * share, ROWS, WIDTH, HEAD_DIM)
        _store_pair(base + HEAD_DIM // 2, row, WORDS, s1 * share, s3 * share, ROWS, WIDTH, HEAD_DIM)
    else:
        _store_pair(base, row, WORDS, s0 * share, s1 * share, ROWS, WIDTH, HEAD_DIM)


@triton.jit
def merge(
    partial,
    statistics,
    result,
    first_program,
    pieces,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Adds the pieces of one pair, MERGED at a time, and writes its heads."""
    row = tl.arange(0, GROUP_WIDTH)
    column = tl.arange(0, HEAD_WIDTH)
    sums = tl.zeros((GROUP_WIDTH, HEAD_WIDTH), tl.float32)
    most = tl.full((GROUP_WIDTH,), LOWEST, tl.float32)
    weight = tl.zeros((GROUP_WIDTH,), tl.float32)
    inside = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    for begin in range(0, pieces, MERGED):
        piece = begin + tl.arange(0, MERGED)
        slot = (first_program + piece) * 2 + (piece == 0).to(tl.int32)
        there = piece < pieces
        at = statistics + slot[:, None] * (2 * GROUP) + row[None, :]
        known = there[:, None] & (row < GROUP)[None, :]
        maxima = tl.load(at, mask=known, other=LOWEST, cache_modifier=".cg")
        weights = tl.load(at + GROUP, mask=known, other=0.0, cache_modifier=".cg")
        values = tl.load(
            partial
            + slot[:, None, None] * (GROUP * HEAD_DIM)
            + row[None, :, None] * HEAD_DIM
            + column[None, None, :],
            mask=there[:, None, None] & inside[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        larger = tl.maximum(most, tl.max(maxima, 0))
        fade = tl.exp2(most - larger)
        shares = tl.exp2(maxima - larger[None, :])
        weight = weight * fade + tl.sum(weights * shares, 0)
        sums = sums * fade[:, None] + tl.sum(values * shares[:, :, None], 0)
        most = larger
    share = 1.0 / tl.maximum(weight, 1e-30)[:, None]
    at = result + row[:, None] * HEAD_DIM + column[None, :]
    tl.store(at, (sums * share).to(result.dtype.element_ty), mask=inside)
