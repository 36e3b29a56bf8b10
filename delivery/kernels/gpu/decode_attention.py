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
from delivery.kernels.gpu.pages import LOWEST, block_of, capped, load_scale, load_tile, nibbles, offset_of
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
    query,
    query_high,
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
    STORED_DIM: tl.constexpr,
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
    """(sums, high sums, extra, maximum, weight) of the tiles first_tile .. last_tile − 1."""
    dtype: tl.constexpr = query.dtype
    exact: tl.constexpr = WIDTH == STORED_DIM
    rows = tl.arange(0, TILE)
    columns = tl.arange(0, WIDTH)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    sums_high = tl.zeros((ROWS, WIDTH if LAYOUT == "int4" else 1), tl.float32)
    extra = tl.zeros((ROWS,), tl.float32)
    most = tl.full((ROWS,), LOWEST, tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    if LAYOUT == "int4":
        query_sum = tl.sum(query.to(tl.float32), 1) + tl.sum(query_high.to(tl.float32), 1)
    block = block_of(table, first_tile * TILE, rows, length, PAGE, TILE)
    for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
        position = tile * TILE + rows
        keep = position < length
        offset = offset_of(tile * TILE, rows, PAGE, TILE)
        k = load_tile(
            k_cache, block, offset, columns, keep, k_stride, head, KV_HEADS, STORED_DIM, exact, False
        )
        if LAYOUT == "int4":
            k_low, k_high = nibbles(k, dtype)
            scores = tl.dot(query, tl.trans(k_low), input_precision=PRECISION)
            scores = tl.dot(query_high, tl.trans(k_high), scores, input_precision=PRECISION)
        else:
            scores = tl.dot(query, tl.trans(k.to(dtype)), input_precision=PRECISION)
        if LAYOUT == "int4":
            step = load_scale(k_scale, block, offset, keep, scale_stride, head, 0, 2, PAGE)
            least = load_scale(k_scale, block, offset, keep, scale_stride, head, 1, 2, PAGE)
            scores = scores * step[None, :] + query_sum[:, None] * least[None, :]
        elif LAYOUT != "auto":
            step = load_scale(k_scale, block, offset, keep, scale_stride, head, 0, 1, PAGE)
            scores *= step[None, :]
        scores = capped(scores, scale, softcap, SOFTCAP)
        seen = keep
        if WINDOW > 0:
            seen = keep & (position >= length - WINDOW)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        fade = tl.exp2(most - larger)
        share = tl.exp2(scores - larger[:, None])
        weight = weight * fade + tl.sum(share, 1)
        most = larger
        v = load_tile(
            v_cache, block, offset, columns, keep, v_stride, head, KV_HEADS, STORED_DIM, exact, True
        )
        if LAYOUT == "int4":
            step = load_scale(v_scale, block, offset, keep, scale_stride, head, 0, 2, PAGE)
            least = load_scale(v_scale, block, offset, keep, scale_stride, head, 1, 2, PAGE)
            extra = extra * fade + tl.sum(share * least[None, :], 1)
            share = (share * step[None, :]).to(dtype)
            v_low, v_high = nibbles(v, dtype)
            sums = tl.dot(share, v_low, sums * fade[:, None], input_precision=PRECISION)
            sums_high = tl.dot(share, v_high, sums_high * fade[:, None], input_precision=PRECISION)
        else:
            if LAYOUT != "auto":
                step = load_scale(v_scale, block, offset, keep, scale_stride, head, 0, 1, PAGE)
                share *= step[None, :]
            sums = tl.dot(share.to(dtype), v.to(dtype), sums * fade[:, None], input_precision=PRECISION)
        block = block_of(table, (tile + 1) * TILE, rows, length, PAGE, TILE)
    if LAYOUT == "int4":
        sums += extra[:, None]
        sums_high += extra[:, None]
    return sums, sums_high, most, weight


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
    STORED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    MERGED: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    LAYOUT: tl.constexpr,
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
    column = tl.arange(0, WIDTH)
    inside = (row < GROUP)[:, None] & (column < STORED_DIM)[None, :]
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
        query = tl.load(queries + row[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0)
        query_high = query
        if LAYOUT == "int4":
            behind = queries + row[:, None] * HEAD_DIM + column[None, :] + STORED_DIM
            query_high = tl.load(behind, mask=inside, other=0.0)
        sums, sums_high, most, weight = _attend(
            query,
            query_high,
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
            STORED_DIM,
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
            at = result + row[:, None] * HEAD_DIM + column[None, :]
            tl.store(at, (sums * share).to(out.dtype.element_ty), mask=inside)
            if LAYOUT == "int4":
                tl.store(at + STORED_DIM, (sums_high * share).to(out.dtype.element_ty), mask=inside)
        else:
            # Slot 1 of a program: the pair that begins in it and goes on; slot 0: one begun before.
            slot = program * 2 + (skipped == 0).to(tl.int32)
            piece_at = partial + slot * (GROUP * HEAD_DIM) + row[:, None] * HEAD_DIM + column[None, :]
            tl.store(piece_at, sums, mask=inside)
            if LAYOUT == "int4":
                tl.store(piece_at + STORED_DIM, sums_high, mask=inside)
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
    """tile: tokens a step; stages: tiles in flight; programs: resident on one multiprocessor."""

    tile: int
    stages: int
    warps: int
    programs: int


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
    page, kv_heads, stored_dim = k_cache.shape[1:]
    layout = layout_of(k_cache).name
    config = config or decode_config(layout, head_dim)
    group = heads // kv_heads
    programs = multiprocessors(q.device) * config.programs
    partial = torch.empty(programs, 2, group, head_dim, dtype=torch.float32, device=q.device)
    statistics = torch.empty(programs, 2, 2, group, dtype=torch.float32, device=q.device)
    group_width, head_width = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    _decode[(programs,)](
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
        arrival_counters(q.device, batch * kv_heads),
        q.stride(0),
        out.stride(0),
        block_table.stride(0),
        k_cache.stride(0),
        v_cache.stride(0),
        0 if k_scale is None else k_scale.stride(0),
        scale,
        softcap or 0.0,
        batch,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        STORED_DIM=stored_dim,
        ROWS=max(16, group_width),
        WIDTH=max(16, triton.next_power_of_2(stored_dim)),
        PAGE=page,
        TILE=config.tile,
        SEQUENCES=16 if batch <= 16 else max(128, triton.next_power_of_2(batch)),
        MERGED=max(1, min(16, 8192 // (group_width * head_width))),
        GROUP_WIDTH=group_width,
        HEAD_WIDTH=head_width,
        LAYOUT=layout,
        WINDOW=sliding_window or 0,
        SOFTCAP=softcap is not None,
        STAGES=config.stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
    )
