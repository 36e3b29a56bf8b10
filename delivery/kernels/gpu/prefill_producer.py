"""Producers of prefill_hopper.py: pages that are copied as they are, and queries."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from delivery.kernels.gpu.hopper import barrier, tma_load
from delivery.kernels.gpu.prefill_order import announce, announced, next_number, steps_of, tile_at

RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""Triton 3.6 has the same under a private name."""
COLUMNS = gl.constexpr(64)
"""Features that lie side by side in shared memory: 128 bytes."""


@gluon.jit
def _blocks(ring, TOKENS: gl.constexpr):
    """A ring of steps [STEP, HEAD_DIM] as blocks [TOKENS, COLUMNS], in the order of memory."""
    COUNT: gl.constexpr = ring.shape[0] * ring.shape[1] * ring.shape[2] // (TOKENS * COLUMNS)
    if RENAMED:
        blocks = ring.reinterpret(ring.dtype, [COUNT, TOKENS, COLUMNS], ring.layout)
    else:
        blocks = ring._reinterpret(ring.dtype, [COUNT, TOKENS, COLUMNS], ring.layout)
    return blocks


@gluon.jit
def copy_pages(
    k_cache,
    v_cache,
    rings,
    barriers,
    notes,
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
    """One warp: chooses tiles; the bulk copy engine brings their pages."""
    k_ring, v_ring = rings
    k_ready, k_free, v_ready, v_free, _q_ready, _q_free, _turns = barriers
    STEP: gl.constexpr = k_ring.shape[1]
    TOKENS: gl.constexpr = STEP // 2
    BYTES: gl.constexpr = STEP * HEAD_DIM * 2
    ACROSS: gl.constexpr = HEAD_DIM // COLUMNS
    k_blocks = _blocks(k_ring, TOKENS)
    v_blocks = _blocks(v_ring, TOKENS)
    stage = 0
    phase = 0
    announcements = 0
    tile = gl.program_id(0)
    while tile < where[4]:
        b, head, start, queries, length, local = tile_at(tile, where, KV_HEADS, QUERIES, SEQUENCES, CHOOSE)
        if local < queries:
            steps = steps_of(length, queries, local, QUERIES, STEP)
            announce(
                notes, announcements, start + local, queries - local, length - queries + local, head, steps
            )
            announcements += 1
            table = b * table_stride
            first = (steps - 1) * STEP
            while first >= 0:
                second = first + TOKENS
                line0 = gl.load(block_table + table + first // PAGE) * PAGE + first % PAGE
                line1 = gl.load(block_table + table + second // PAGE, mask=second < length, other=0) * PAGE
                line1 += second % PAGE
                first -= STEP
                mbarrier.wait(k_free.index(stage), phase ^ 1)
                mbarrier.expect(k_ready.index(stage), BYTES)
                for part in gl.static_range(ACROSS):
                    column = head * HEAD_DIM + part * COLUMNS
                    block = (stage * ACROSS + part) * 2
                    tma_load(k_cache, [line0, column], k_ready.index(stage), k_blocks.index(block))
                    tma_load(k_cache, [line1, column], k_ready.index(stage), k_blocks.index(block + 1))
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                mbarrier.expect(v_ready.index(stage), BYTES)
                for part in gl.static_range(ACROSS):
                    column = head * HEAD_DIM + part * COLUMNS
                    block = (stage * ACROSS + part) * 2
                    tma_load(v_cache, [line0, column], v_ready.index(stage), v_blocks.index(block))
                    tma_load(v_cache, [line1, column], v_ready.index(stage), v_blocks.index(block + 1))
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
        # Not before: a program with a long tile in hand must not take the next from an idle one.
        tile = next_number(where)
    announce(notes, announcements, 0, 0, 0, 0, 0)


@gluon.jit
def load_queries(
    q,
    q_tile,
    q_ready,
    q_free,
    notes,
    q_stride,
    UPPER: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """One warp: brings a consumer's next queries as soon as that one has started its last scores."""
    ROWS: gl.constexpr = q_tile.shape[0]
    PART: gl.constexpr = 16
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [gl.num_warps(), 1], [1, 0])
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, L)).expand_dims(0)
    number = 0
    first, left, _lowest, head, steps = announced(notes, 0)
    while steps > 0:
        tile = q + first * q_stride + head * (GROUP * HEAD_DIM)
        mbarrier.wait(q_free, number % 2 ^ 1)
        for part in gl.static_range(ROWS // PART):
            row = UPPER * ROWS + part * PART + gl.arange(0, PART, gl.SliceLayout(1, L))
            # Rows that nobody has repeat the last query: their results are not written.
            at = gl.minimum(row // GROUP, left - 1) * q_stride + (row % GROUP) * HEAD_DIM
            async_copy.async_copy_global_to_shared(
                q_tile.slice(part * PART, PART), tile + (at.expand_dims(1) + column)
            )
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        mbarrier.arrive(q_ready, count=1)
        number += 1
        first, left, _lowest, head, steps = announced(notes, number)
