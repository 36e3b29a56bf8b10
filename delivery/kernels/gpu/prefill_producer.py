"""The producer of prefill_hopper.py for pages that are copied as they are, and the order of tiles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from delivery.kernels.gpu.hopper import tma_load


@gluon.jit
def tile_of_round(
    base,
    where,
    KV_HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    SEQUENCES: gl.constexpr,
    CHOOSE: gl.constexpr,
):
    """(sequence, kv head, its first row of q, its queries, its length, first query) of a program's tile.

    Tiles lie as in prefill_attention.py, longest first; rounds run back and forth over the programs, so that
    none gets the longest tile of every round. A first query past `queries` says that there is no tile.
    """
    query_start, context_lens, num_decodes, num_sequences, tiles = where
    LANES: gl.constexpr = gl.BlockedLayout([max(1, SEQUENCES // 32)], [32], [gl.num_warps()], [0])
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    if (base // programs) % 2 == 1:
        own = programs - 1 - own
    tile = base + own
    head = tile % KV_HEADS
    number = tiles // KV_HEADS - 1 - tile // KV_HEADS
    # Sequences of this call are num_decodes .. num_sequences − 1, their rows begin at num_decodes.
    lane = gl.arange(0, SEQUENCES, LANES)
    owned = num_decodes + lane < num_sequences
    starts = gl.load(query_start + num_decodes + lane, mask=owned, other=0) - num_decodes
    before = gl.sum((owned & (starts // QUERIES + lane <= number)).to(gl.int32), 0) - 1
    b = num_decodes + gl.maximum(before, 0)
    start = gl.load(query_start + b)
    queries = gl.load(query_start + b + 1) - start
    local = (number - ((start - num_decodes) // QUERIES + before)) * QUERIES
    if CHOOSE:
        queries = gl.where(queries == 1, 0, queries)
    if tile >= tiles:
        queries = 0
        local = 0
    return b, head, start, queries, gl.load(context_lens + b), local


@gluon.jit
def steps_of(length, queries, local, QUERIES: gl.constexpr, TOKENS: gl.constexpr):
    """Steps of two pages that a tile takes: at least one, so that a sequence without context gives zeros."""
    end = gl.minimum(length - queries + local + QUERIES, length)
    return gl.maximum((end + 2 * TOKENS - 1) // (2 * TOKENS), 1)


@gluon.jit
def copy_pages(
    k_cache,
    v_cache,
    rings,
    barriers,
    block_table,
    table_stride,
    where,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE: gl.constexpr,
    QUERIES: gl.constexpr,
    SEQUENCES: gl.constexpr,
    CHOOSE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp: the bulk copy engine brings pages of the model's own dtype as they are."""
    k_ring, v_ring = rings
    k_ready, k_free, v_ready, v_free, _turns = barriers
    TOKENS: gl.constexpr = k_ring.shape[1]
    BYTES: gl.constexpr = 2 * TOKENS * HEAD_DIM * 2
    stage = 0
    phase = 0
    for base in range(0, where[4], gl.num_programs(0)):
        b, head, _start, queries, length, local = tile_of_round(
            base, where, KV_HEADS, QUERIES, SEQUENCES, CHOOSE
        )
        if local < queries:
            table = block_table + b.to(gl.int64) * table_stride
            steps = steps_of(length, queries, local, QUERIES, TOKENS)
            column = head * HEAD_DIM
            for back in range(steps):
                first = (steps - 1 - back) * (2 * TOKENS)
                second = first + TOKENS
                line0 = gl.load(table + first // PAGE) * PAGE + first % PAGE
                line1 = gl.load(table + second // PAGE, mask=second < length, other=0) * PAGE + second % PAGE
                mbarrier.wait(k_free.index(stage), phase ^ 1)
                mbarrier.expect(k_ready.index(stage), BYTES)
                tma_load(k_cache, [line0, column], k_ready.index(stage), k_ring.index(2 * stage))
                tma_load(k_cache, [line1, column], k_ready.index(stage), k_ring.index(2 * stage + 1))
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                mbarrier.expect(v_ready.index(stage), BYTES)
                tma_load(v_cache, [line0, column], v_ready.index(stage), v_ring.index(2 * stage))
                tma_load(v_cache, [line1, column], v_ready.index(stage), v_ring.index(2 * stage + 1))
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
