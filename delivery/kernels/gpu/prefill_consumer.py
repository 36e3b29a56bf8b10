"""The consumers of prefill_hopper.py: the tiles of 64 rows that each is told of, one after the other."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from delivery.kernels.gpu.hopper import barrier
from delivery.kernels.gpu.prefill_order import announced
from delivery.kernels.gpu.prefill_step import (
    LOWEST,
    ROWS,
    STEP,
    finished,
    further_steps,
    here,
    last_sums,
    next_step,
    operand,
    products,
    softmax,
    write,
)


@gluon.jit
def consume_copied(
    out,
    q_tile,
    rings,
    barriers,
    notes,
    out_stride,
    factor,
    UPPER: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Pages and queries come as they are, and steps follow one another without a break: the first scores of a
    tile start beside the last sums of the tile before, whose results are written while the other consumer
    multiplies."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # noqa: E741
    A: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    _k_ready, _k_free, _v_ready, _v_free, q_ready, _q_free, _turns = barriers
    zero = gl.zeros([ROWS, STEP], gl.float32, S)
    # Before the first tile stands one of no queries, whose shares are zero.
    shares = gl.zeros([ROWS, STEP], q_tile.dtype, A)
    sums = gl.zeros([ROWS, HEAD_DIM], gl.float32, O)
    weight = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    to = 0
    left = 0
    at = (0, 0, 0, 0)
    turn = 1 - UPPER
    number = 0
    row, there, lowest, head, steps = announced(notes, 0)
    while steps > 0:
        mbarrier.wait(q_ready.index(UPPER), number % 2)
        next_to = row * out_stride + head * (GROUP * HEAD_DIM)
        query_position = lowest + (UPPER * ROWS + here(gl.arange(0, ROWS, gl.SliceLayout(1, S)))) // GROUP
        first = (steps - 1) * STEP
        most = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, S))
        nothing = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        scores, sums = products(
            q_tile, rings, barriers, at, turn, shares, sums, zero, steps == 1, UPPER, True
        )
        scores, most, tile_weight, _fade = softmax(
            scores, most, nothing, first, query_position, factor, True, S
        )
        sums, scores = finished(sums, shares, scores, barriers, at, left > 0)
        write(out, to, left, out_stride, sums, weight, UPPER, GROUP, HEAD_DIM, QUERIES, O)
        weight = tile_weight
        turn ^= 1
        shares = operand(scores, q_tile.dtype, A)
        sums = gl.zeros([ROWS, HEAD_DIM], gl.float32, O)
        to = next_to
        left = there
        if first + STEP > lowest + there:
            _clear_behind(rings, barriers, at, first, lowest + there)
        at = next_step(at, STAGES)
        shares, sums, weight, at, turn = further_steps(
            q_tile, rings, barriers, at, turn, shares, sums, most, weight, steps, lowest, query_position,
            factor, zero, UPPER, True, STAGES, S, O,
        )  # fmt: skip
        number += 1
        row, there, lowest, head, steps = announced(notes, number)
    if left > 0:
        sums = last_sums(rings, barriers, at, shares, sums)
        write(out, to, left, out_stride, sums, weight, UPPER, GROUP, HEAD_DIM, QUERIES, O)


@gluon.jit
def _clear_behind(rings, barriers, at, first, length):
    """Zeros for values of a step behind a sequence's end: that memory may hold anything, and 0 · NaN is NaN.
    Both consumers write the same zeros, and the values in front as they are."""
    _k_ring, v_ring = rings
    _k_ready, _k_free, v_ready, _v_free, _q_ready, _q_free, _turns = barriers
    HEAD_DIM: gl.constexpr = v_ring.shape[2]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    PART: gl.constexpr = 32
    mbarrier.wait(v_ready.index(at[0]), at[1])
    for part in gl.static_range(STEP // PART):
        token = first + part * PART + gl.arange(0, PART, gl.SliceLayout(1, WIDE))
        values = v_ring.index(at[0]).slice(part * PART, PART)
        values.store(gl.where((token < length).expand_dims(1), values.load(WIDE), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def consume_converted(
    q,
    out,
    q_tile,
    rings,
    barriers,
    notes,
    q_stride,
    out_stride,
    factor,
    UPPER: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Pages come from a producer that needs a warp group's registers. A consumer brings its own queries, and
    finishes a tile before the next."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # noqa: E741
    A: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    k_ring, _v_ring = rings
    k_ready, k_free, _v_ready, _v_free, _q_ready, _q_free, _turns = barriers
    zero = gl.zeros([ROWS, STEP], gl.float32, S)
    at = (0, 0, 0, 0)
    turn = 1 - UPPER
    number = 0
    row, there, lowest, head, steps = announced(notes, 0)
    while steps > 0:
        mine = UPPER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
        own = (row + mine // GROUP) * q_stride + (head * GROUP + mine % GROUP) * HEAD_DIM
        inside = (mine // GROUP < there) & (mine < QUERIES * GROUP)
        column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, WIDE)).expand_dims(0)
        loaded = gl.load(q + own.expand_dims(1) + column, mask=inside.expand_dims(1), other=0.0)
        barrier()  # every warp is done with the tile before
        q_tile.store(loaded.to(q_tile.dtype))
        fence_async_shared()
        barrier()
        to = row * out_stride + head * (GROUP * HEAD_DIM)
        query_position = lowest + (UPPER * ROWS + here(gl.arange(0, ROWS, gl.SliceLayout(1, S)))) // GROUP
        most = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, S))
        nothing = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        mbarrier.wait(k_ready.index(at[0]), at[1])
        keys = k_ring.index(at[0]).permute([1, 0])
        scores = warpgroup_mma(q_tile, keys, zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, [scores])
        mbarrier.arrive(k_free.index(at[0]), count=1)
        scores, most, weight, _fade = softmax(
            scores, most, nothing, (steps - 1) * STEP, query_position, factor, True, S
        )
        shares = operand(scores, q_tile.dtype, A)
        sums = gl.zeros([ROWS, HEAD_DIM], gl.float32, O)
        at = next_step(at, STAGES)
        shares, sums, weight, at, turn = further_steps(
            q_tile, rings, barriers, at, turn, shares, sums, most, weight, steps, lowest, query_position,
            factor, zero, UPPER, False, STAGES, S, O,
        )  # fmt: skip
        sums = last_sums(rings, barriers, at, shares, sums)
        write(out, to, there, out_stride, sums, weight, UPPER, GROUP, HEAD_DIM, QUERIES, O)
        number += 1
        row, there, lowest, head, steps = announced(notes, number)
