"""Decode attention: one query a sequence, the whole card shared out evenly.

All tiles of all (sequence, kv head) pairs form one line; each program takes an equal, contiguous piece
of it, whatever the lengths are, and the grid is as large as the card: no host knowledge of the lengths,
no empty programs, the same launch in a CUDA graph for every step. A pair cut by a border leaves partial
sums; the program that arrives last at the pair's counter merges them and resets the counter.

The query heads of one kv head are the rows of the tensor-core tile, so keys and values are read once.
Bytes: context · kv heads · head_dim · 2 values, near enough; operations: 4 · heads · head_dim · context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from delivery.kernels.gpu.arrivals import arrival_counters
from delivery.kernels.gpu.decode_config import ALONE, DecodeConfig, decode_config, sequence_lanes
from delivery.kernels.gpu.decode_tiles import attend, load_pair, merge, store
from delivery.kernels.gpu.overlap import gdc_launch_dependents, gdc_wait, overlaps
from delivery.kernels.kv_layout import layout_of
from delivery.kernels.targets import multiprocessors, shared_memory

_COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _tiles(length, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """(first tile, number of tiles) that the query of a sequence reads; at least one, so that it writes."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // TILE
    return first, tl.maximum(tl.cdiv(length, TILE) - first, 1)


@triton.jit(do_not_specialize=["table_stride", "num_sequences"])
def _decode(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    block_table,
    query_start,
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
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
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
    CHOOSE: tl.constexpr,
    OVERLAP: tl.constexpr,
    LATE: tl.constexpr,
):
    if OVERLAP and not LATE:
        gdc_launch_dependents()
    sequence = tl.arange(0, SEQUENCES)
    lengths = tl.load(context_lens + sequence, mask=sequence < num_sequences, other=0)
    _, counts = _tiles(lengths, TILE, WINDOW)
    taking = sequence < num_sequences
    if CHOOSE:
        queries_end = tl.load(query_start + sequence + 1, mask=taking, other=0)
        taking = taking & (queries_end - tl.load(query_start + sequence, mask=taking, other=0) == 1)
    ends = tl.cumsum(tl.where(taking, counts * KV_HEADS, 0), 0)
    total = tl.max(ends, 0)
    piece = tl.cdiv(total, tl.num_programs(0))
    program = tl.program_id(0)
    position = program * piece
    end = tl.minimum(position + piece, total)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)
    own = tl.where(row < GROUP, row, -1)  # rows of the tile that are query heads
    if OVERLAP:
        gdc_wait()
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

        query = b.to(tl.int64)
        if CHOOSE:
            query = tl.load(query_start + b).to(tl.int64)
        queries = q + query * q_stride + head * (GROUP * HEAD_DIM)
        if LAYOUT == "auto":
            inside = (own >= 0)[:, None] & (lane < WORDS)[None, :]
            at = queries + own[:, None] * HEAD_DIM + lane[None, :]
            q0 = tl.load(at, mask=inside, other=0.0).to(COMPUTE)
            q1 = q0
            q2 = q0
            q3 = q0
        else:
            even, odd = load_pair(queries, own, WORDS, ROWS, WIDTH, HEAD_DIM)
            q0 = even.to(COMPUTE)
            q1 = odd.to(COMPUTE)
            q2 = q1
            q3 = q1
            if LAYOUT == "int4":
                q2 = q1
                even, odd = load_pair(queries + HEAD_DIM // 2, own, WORDS, ROWS, WIDTH, HEAD_DIM)
                q1 = even.to(COMPUTE)
                q3 = odd.to(COMPUTE)
        s0, s1, s2, s3, most, weight = attend(
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
            TOKEN_STRIDE,
            HEAD_STRIDE,
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
        result = out + query * out_stride + head * (GROUP * HEAD_DIM)
        if taken == count:
            share = 1.0 / tl.maximum(weight, 1e-30)[:, None]
            store(result, own, s0, s1, s2, s3, share, ROWS, WIDTH, WORDS, HEAD_DIM, LAYOUT)
        else:
            # Slot 1 of a program: the pair that begins in it and goes on; slot 0: one begun before.
            slot = program * 2 + (skipped == 0).to(tl.int32)
            piece_at = partial + slot * (GROUP * HEAD_DIM)
            store(piece_at, own, s0, s1, s2, s3, 1.0, ROWS, WIDTH, WORDS, HEAD_DIM, LAYOUT)
            tl.store(statistics + slot * (2 * GROUP) + row, most, mask=row < GROUP)
            tl.store(statistics + slot * (2 * GROUP) + GROUP + row, weight, mask=row < GROUP)
            first_program = start // piece
            pieces = (start + count - 1) // piece - first_program + 1
            tl.debug_barrier()  # the whole program's stores come before its arrival is announced
            pair = b * KV_HEADS + head
            others = tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu")
            if others == pieces - 1:
                merge(
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
    if OVERLAP and LATE:
        gdc_launch_dependents()


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
    query_start: torch.Tensor | None = None,
) -> None:
    """Attention of query b of q [B, heads, head_dim] over sequence b, written to out [B, heads, head_dim].

    query_start int32 [B + 1]: the rows of q that sequence b has; it is left out unless it has one.
    """
    heads, head_dim = q.shape[1:]
    batch = context_lens.shape[0]
    layout = layout_of(k_cache).name
    k_words, v_words = (c if layout == "auto" else c.view(torch.int16) for c in (k_cache, v_cache))
    page, kv_heads, words = k_words.shape[1:]
    token_bytes = 2 * words * k_words.element_size()
    config = config or decode_config(layout, token_bytes, batch * kv_heads, *shared_memory(q.device))
    group = heads // kv_heads
    programs = multiprocessors(q.device) * config.programs
    partial = torch.empty(programs, 2, group, head_dim, dtype=torch.float32, device=q.device)
    statistics = torch.empty(programs, 2, 2, group, dtype=torch.float32, device=q.device)
    merged = config.warps * 32 * (64 if config.programs < 3 else 32)  # values that fit into registers
    overlap = overlaps(q.device)
    group_width, head_width = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    _decode[(programs,)](
        q,
        k_words,
        v_words,
        k_scale,
        v_scale,
        block_table,
        query_start,
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
        TOKEN_STRIDE=k_words.stride(1),
        HEAD_STRIDE=k_words.stride(2),
        HEAD_DIM=head_dim,
        WORDS=words,
        ROWS=max(16, group_width),
        WIDTH=max(16, triton.next_power_of_2(words)),
        PAGE=page,
        TILE=config.tile,
        SEQUENCES=sequence_lanes(batch),
        MERGED=max(1, min(16, merged // (group_width * head_width))),
        GROUP_WIDTH=group_width,
        HEAD_WIDTH=head_width,
        LAYOUT=layout,
        COMPUTE=_COMPUTE[q.dtype if layout == "auto" or q.dtype == torch.float32 else torch.float16],
        WINDOW=sliding_window or 0,
        SOFTCAP=softcap is not None,
        STAGES=config.stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        CHOOSE=query_start is not None,
        OVERLAP=overlap,
        # A kernel that waits beside a long one takes issue slots and shared memory from it.
        LATE=batch * kv_heads > ALONE,
        launch_pdl=overlap,
        num_warps=config.warps,
        maxnreg=config.registers,
    )
