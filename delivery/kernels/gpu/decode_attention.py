"""Decode attention: one query a sequence, the whole card shared out evenly.

All tiles of all (sequence, kv head) pairs form one line; each program takes an equal, contiguous piece
of it, whatever the lengths are, and the grid is as large as the card: no host knowledge of the lengths,
no empty programs, the same launch in a CUDA graph for every step. A pair cut by a border leaves partial
sums; the program that arrives last at the pair's counter merges them and resets the counter.

The query heads of one kv head are the rows of the tensor-core tile, so keys and values are read once.
Bytes: context · kv heads · head_dim · 2 values, near enough; operations: 4 · heads · head_dim · context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from delivery.kernels.gpu.arrivals import arrival_counters
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
from delivery.kernels.kv_layout import layout_of
from delivery.kernels.targets import multiprocessors


@triton.jit
def _tiles(length, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """(first tile, number of tiles) that the query of a sequence reads; at least one, so that it writes."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // TILE
    return first, tl.maximum(tl.cdiv(length, TILE) - first, 1)


@triton.jit
def _attend(
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
    KV_HEADS: tl.constexpr,
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
        k = load_tile(k_cache, block, offset, columns, keep, k_stride, head, KV_HEADS, WORDS, exact, False)
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
        v = load_tile(v_cache, block, offset, columns, keep, v_stride, head, KV_HEADS, WORDS, exact, True)
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
def _load_pair(base, row, words, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Even and odd features [ROWS, WIDTH] of neighbouring ones at `base`; 0 past `words`."""
    feature = tl.arange(0, 2 * WIDTH)
    inside = (row >= 0)[:, None] & (feature < 2 * words)[None, :]
    both = tl.load(base + row[:, None] * HEAD_DIM + feature[None, :], mask=inside, other=0.0)
    return tl.split(tl.reshape(both, (ROWS, WIDTH, 2)))


@triton.jit
def _store_pair(base, row, words, even, odd, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The inverse of `_load_pair`, in the dtype of `base`."""
    feature = tl.arange(0, 2 * WIDTH)
    inside = (row >= 0)[:, None] & (feature < 2 * words)[None, :]
    both = tl.reshape(tl.join(even, odd), (ROWS, 2 * WIDTH)).to(base.dtype.element_ty)
    tl.store(base + row[:, None] * HEAD_DIM + feature[None, :], both, mask=inside)


@triton.jit
def _store(
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


@triton.jit(do_not_specialize=["table_stride", "num_sequences"])
def _decode(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    block_table,
    context_lens,
    out,
    partial,
    statistics,
    arrived,
    q_stride,
    out_stride,
    table_stride,
    k_stride,
    v_stride,
    scale_stride,
    scale,
    softcap,
    num_sequences,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    MERGED: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    LAYOUT: tl.constexpr,
    COMPUTE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence = tl.arange(0, SEQUENCES)
    lengths = tl.load(context_lens + sequence, mask=sequence < num_sequences, other=0)
    _, counts = _tiles(lengths, TILE, WINDOW)
    ends = tl.cumsum(tl.where(sequence < num_sequences, counts * KV_HEADS, 0), 0)
    total = tl.max(ends, 0)
    piece = tl.cdiv(total, tl.num_programs(0))
    program = tl.program_id(0)
    position = program * piece
    end = tl.minimum(position + piece, total)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)
    own = tl.where(row < GROUP, row, -1)  # rows of the tile that are query heads
    while position < end:
        before = ends <= position
        b = tl.sum(before.to(tl.int32), 0)
        start = tl.max(tl.where(before, ends, 0), 0)
        length = tl.load(context_lens + b)
        first_tile, count = _tiles(length, TILE, WINDOW)
        head = (position - start) // count
        start += head * count  # where this (sequence, kv head) begins on the line
        skipped = position - start
        taken = tl.minimum(count - skipped, end - position)

        queries = q + b.to(tl.int64) * q_stride + head * (GROUP * HEAD_DIM)
        if LAYOUT == "auto":
            inside = (own >= 0)[:, None] & (lane < WORDS)[None, :]
            at = queries + own[:, None] * HEAD_DIM + lane[None, :]
            q0 = tl.load(at, mask=inside, other=0.0).to(COMPUTE)
            q1 = q0
            q2 = q0
            q3 = q0
        else:
            even, odd = _load_pair(queries, own, WORDS, ROWS, WIDTH, HEAD_DIM)
            q0 = even.to(COMPUTE)
            q1 = odd.to(COMPUTE)
            q2 = q1
            q3 = q1
            if LAYOUT == "int4":
                q2 = q1
                even, odd = _load_pair(queries + HEAD_DIM // 2, own, WORDS, ROWS, WIDTH, HEAD_DIM)
                q1 = even.to(COMPUTE)
                q3 = odd.to(COMPUTE)
        s0, s1, s2, s3, most, weight = _attend(
            q0,
            q1,
            q2,
            q3,
            k_cache,
            v_cache,
            k_scale,
            v_scale,
            block_table + b.to(tl.int64) * table_stride,
            length,
            head,
            first_tile + skipped,
            first_tile + skipped + taken,
            k_stride,
            v_stride,
            scale_stride,
            scale,
            softcap,
            KV_HEADS,
            WORDS,
            ROWS,
            WIDTH,
            PAGE,
            TILE,
            LAYOUT,
            WINDOW,
            SOFTCAP,
            STAGES,
            PRECISION,
        )
        result = out + b.to(tl.int64) * out_stride + head * (GROUP * HEAD_DIM)
        if taken == count:
            share = 1.0 / tl.maximum(weight, 1e-30)[:, None]
            _store(result, own, s0, s1, s2, s3, share, ROWS, WIDTH, WORDS, HEAD_DIM, LAYOUT)
        else:
            # Slot 1 of a program: the pair that begins in it and goes on; slot 0: one begun before.
            slot = program * 2 + (skipped == 0).to(tl.int32)
            piece_at = partial + slot * (GROUP * HEAD_DIM)
            _store(piece_at, own, s0, s1, s2, s3, 1.0, ROWS, WIDTH, WORDS, HEAD_DIM, LAYOUT)
            tl.store(statistics + slot * (2 * GROUP) + row, most, mask=row < GROUP)
            tl.store(statistics + slot * (2 * GROUP) + GROUP + row, weight, mask=row < GROUP)
            first_program = start // piece
            pieces = (start + count - 1) // piece - first_program + 1
            tl.debug_barrier()  # the whole program's stores come before its arrival is announced
            pair = b * KV_HEADS + head
            others = tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu")
            if others == pieces - 1:
                _merge(
                    partial,
                    statistics,
                    result,
                    first_program,
                    pieces,
                    GROUP,
                    HEAD_DIM,
                    GROUP_WIDTH,
                    HEAD_WIDTH,
                    MERGED,
                )
                tl.store(arrived + pair, 0)
        position += taken


@triton.jit
def _merge(
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


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """tile: tokens a step; stages: tiles in flight; programs: resident on one multiprocessor.

    registers: at most so many a thread (None: no limit), where more programs must be resident.
    """

    tile: int
    stages: int
    warps: int
    programs: int
    registers: int | None = None


_COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def decode_config(layout: str, head_dim: int) -> DecodeConfig:
    """What measured best on an H200; see docs/performance.md."""
    if head_dim > 128:
        return DecodeConfig(32, 2, 4, 2) if layout == "auto" else DecodeConfig(64, 2, 4, 2)
    if layout == "auto":
        return DecodeConfig(64, 3, 4, 2)
    return DecodeConfig(128, 3, 4, 2)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    config: DecodeConfig | None = None,
) -> None:
    """Attention of query b of q [B, heads, head_dim] over sequence b, written to out [B, heads, head_dim]."""
    batch, heads, head_dim = q.shape
    layout = layout_of(k_cache).name
    k_words, v_words = (c if layout == "auto" else c.view(torch.int16) for c in (k_cache, v_cache))
    page, kv_heads, words = k_words.shape[1:]
    config = config or decode_config(layout, head_dim)
    group = heads // kv_heads
    programs = multiprocessors(q.device) * config.programs
    partial = torch.empty(programs, 2, group, head_dim, dtype=torch.float32, device=q.device)
    statistics = torch.empty(programs, 2, 2, group, dtype=torch.float32, device=q.device)
    merged = config.warps * 32 * (64 if config.programs < 3 else 32)  # values that fit into registers
    group_width, head_width = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    _decode[(programs,)](
        q,
        k_words,
        v_words,
        k_scale,
        v_scale,
        block_table,
        context_lens,
        out,
        partial,
        statistics,
        arrival_counters(q.device, batch * kv_heads),
        q.stride(0),
        out.stride(0),
        block_table.stride(0),
        k_words.stride(0),
        v_words.stride(0),
        0 if k_scale is None else k_scale.stride(0),
        scale,
        softcap or 0.0,
        batch,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        WORDS=words,
        ROWS=max(16, group_width),
        WIDTH=max(16, triton.next_power_of_2(words)),
        PAGE=page,
        TILE=config.tile,
        SEQUENCES=16 if batch <= 16 else max(128, triton.next_power_of_2(batch)),
        MERGED=max(1, min(16, merged // (group_width * head_width))),
        GROUP_WIDTH=group_width,
        HEAD_WIDTH=head_width,
        LAYOUT=layout,
        COMPUTE=_COMPUTE[q.dtype if layout == "auto" or q.dtype == torch.float32 else torch.float16],
        WINDOW=sliding_window or 0,
        SOFTCAP=softcap is not None,
        STAGES=config.stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        maxnreg=config.registers,
    )
