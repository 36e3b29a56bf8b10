"""The consumers of prefill_hopper.py: products, online softmax and results of 64 rows each."""

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
from delivery.kernels.gpu.prefill_producer import steps_of, tile_of_round

ROWS = gl.constexpr(64)
"""Rows of a consumer: what one warp group multiplies at once."""
TOKENS = gl.constexpr(64)
"""Tokens of a page in the rings; a step is two of them."""
LOWEST = gl.constexpr(-1.0e30)
"""Start of the running maximum: finite, so that a row which sees nothing gives 0 and not NaN."""


@gluon.jit
def _exp2(x):
    """2^x; one instruction, where gl.exp2 keeps denormal results with four."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _operand(x, dtype: gl.constexpr, A: gl.constexpr):
    """float32 scores as operand A of a product; two values a register from the start."""
    if dtype == gl.bfloat16:
        packed = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        packed = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return gl.convert_layout(packed, A)


@gluon.jit
def _start_scores(q_tile, k_ring, at, zero):
    """Two products under way: the tile's queries with the two pages of a step."""
    s0 = warpgroup_mma(q_tile, k_ring.index(at).permute([1, 0]), zero, use_acc=False, is_async=True)
    s1 = warpgroup_mma(q_tile, k_ring.index(at + 1).permute([1, 0]), zero, use_acc=False, is_async=True)
    return s0, s1


@gluon.jit
def _softmax(s0, s1, most, weight, first, query_position, factor, MASKED: gl.constexpr, S: gl.constexpr):
    """(shares of both pages, maximum, weight, what earlier sums fade by); exponents of 2."""
    if MASKED:
        key = first + gl.arange(0, TOKENS, gl.SliceLayout(0, S)).expand_dims(0)
        s0 = gl.where(key <= query_position.expand_dims(1), s0, float("-inf"))
        s1 = gl.where(key + TOKENS <= query_position.expand_dims(1), s1, float("-inf"))
    larger = gl.maximum(most, gl.max(gl.maximum(s0, s1), 1) * factor)
    fade = _exp2(most - larger)
    s0 = _exp2(s0 * factor - larger.expand_dims(1))
    s1 = _exp2(s1 * factor - larger.expand_dims(1))
    return s0, s1, larger, weight * fade + gl.sum(s0 + s1, 1), fade


@gluon.jit
def _step(
    q_tile,
    rings,
    barriers,
    stage,
    phase,
    before,
    before_phase,
    turn,
    p0,
    p1,
    sums,
    most,
    weight,
    first,
    query_position,
    factor,
    zero,
    UPPER: gl.constexpr,
    MASKED: gl.constexpr,
    S: gl.constexpr,
    O: gl.constexpr,  # noqa: E741
):
    """Starts the scores of a step and the sums of the step before, and folds the scores in."""
    k_ring, v_ring = rings
    k_ready, k_free, v_ready, v_free, turns = barriers
    mbarrier.wait(k_ready.index(stage), phase)
    mbarrier.wait(v_ready.index(before), before_phase)
    # The consumers start their products in turns: one has its softmax while the other multiplies.
    mbarrier.wait(turns.index(UPPER), turn)
    s0, s1 = _start_scores(q_tile, k_ring, 2 * stage, zero)
    sums = warpgroup_mma(p0, v_ring.index(2 * before), sums, is_async=True)
    sums = warpgroup_mma(p1, v_ring.index(2 * before + 1), sums, is_async=True)
    mbarrier.arrive(turns.index(1 - UPPER), count=1)
    s0, s1 = warpgroup_mma_wait(2, [s0, s1])
    mbarrier.arrive(k_free.index(stage), count=1)
    s0, s1, most, weight, fade = _softmax(s0, s1, most, weight, first, query_position, factor, MASKED, S)
    # p0 and p1 are named in the wait, so that their registers are not written while a product reads them;
    # s0 and s1, so that their exponentials do not wait for it.
    sums, p0, p1, s0, s1 = warpgroup_mma_wait(0, [sums, p0, p1, s0, s1])
    mbarrier.arrive(v_free.index(before), count=1)
    sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, O)).expand_dims(1)
    A: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    p0 = _operand(s0, q_tile.dtype, A)
    p1 = _operand(s1, q_tile.dtype, A)
    return p0, p1, sums, most, weight


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def consume(
    q,
    out,
    q_tile,
    rings,
    barriers,
    where,
    q_stride,
    out_stride,
    factor,
    UPPER: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    SEQUENCES: gl.constexpr,
    CHOOSE: gl.constexpr,
    CONVERTED: gl.constexpr,
    STAGES: gl.constexpr,
):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # noqa: E741
    A: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    ACROSS: gl.constexpr = gl.SliceLayout(0, WIDE)
    k_ring, v_ring = rings
    k_ready, k_free, v_ready, v_free, _turns = barriers
    dtype: gl.constexpr = q_tile.dtype
    zero = gl.zeros([ROWS, TOKENS], gl.float32, S)
    stage = 0
    phase = 0
    turn = 1 - UPPER
    for base in range(0, where[4], gl.num_programs(0)):
        _b, head, start, queries, length, local = tile_of_round(
            base, where, KV_HEADS, QUERIES, SEQUENCES, CHOOSE
        )
        if local < queries:
            row = UPPER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
            at = (start + local + row // GROUP).to(gl.int64) * q_stride
            at += (head * GROUP + row % GROUP) * HEAD_DIM
            inside = (local + row // GROUP < queries) & (row < QUERIES * GROUP)
            column = gl.arange(0, HEAD_DIM, ACROSS).expand_dims(0)
            loaded = gl.load(q + at.expand_dims(1) + column, mask=inside.expand_dims(1), other=0.0)
            barrier()  # every warp is done with the tile before
            q_tile.store(loaded.to(dtype))
            fence_async_shared()
            barrier()

            mine = UPPER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S))
            lowest = length - queries + local  # position of the tile's first query
            query_position = lowest + mine // GROUP
            steps = steps_of(length, queries, local, QUERIES, TOKENS)
            # Steps that every row sees whole; `lowest` is negative where there is no context.
            open_steps = gl.minimum(gl.maximum(lowest + 1, 0) // (2 * TOKENS), steps - 1)
            first = (steps - 1) * (2 * TOKENS)
            mbarrier.wait(k_ready.index(stage), phase)
            s0, s1 = _start_scores(q_tile, k_ring, 2 * stage, zero)
            s0, s1 = warpgroup_mma_wait(0, [s0, s1])
            mbarrier.arrive(k_free.index(stage), count=1)
            most = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, S))
            weight = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
            s0, s1, most, weight, _fade = _softmax(
                s0, s1, most, weight, first, query_position, factor, True, S
            )
            p0 = _operand(s0, dtype, A)
            p1 = _operand(s1, dtype, A)
            sums = gl.zeros([ROWS, HEAD_DIM], gl.float32, O)
            if not CONVERTED:  # noqa: SIM102 (decided when compiled; the other when run)
                if first + 2 * TOKENS > length:
                    # Memory behind a sequence's end may hold anything, and 0 · NaN is NaN. Both consumers
                    # write the same zeros, and the values in front as they are.
                    mbarrier.wait(v_ready.index(stage), phase)
                    token = gl.arange(0, TOKENS, gl.SliceLayout(1, WIDE)).expand_dims(1)
                    for page in gl.static_range(2):
                        values = v_ring.index(2 * stage + page)
                        there = first + page * TOKENS + token < length
                        values.store(gl.where(there, values.load(WIDE), 0.0))
                    fence_async_shared()
                    barrier()
            before = stage
            before_phase = phase
            stage, phase = _next(stage, phase, STAGES)
            for _ in range(open_steps, steps - 1):
                first -= 2 * TOKENS
                p0, p1, sums, most, weight = _step(
                    q_tile, rings, barriers, stage, phase, before, before_phase, turn, p0, p1, sums, most,
                    weight, first, query_position, factor, zero, UPPER, True, S, O,
                )  # fmt: skip
                turn ^= 1
                before = stage
                before_phase = phase
                stage, phase = _next(stage, phase, STAGES)
            for _ in range(open_steps):
                p0, p1, sums, most, weight = _step(
                    q_tile, rings, barriers, stage, phase, before, before_phase, turn, p0, p1, sums, most,
                    weight, first, query_position, factor, zero, UPPER, False, S, O,
                )  # fmt: skip
                turn ^= 1
                before = stage
                before_phase = phase
                stage, phase = _next(stage, phase, STAGES)
            mbarrier.wait(v_ready.index(before), before_phase)
            sums = warpgroup_mma(p0, v_ring.index(2 * before), sums, is_async=True)
            sums = warpgroup_mma(p1, v_ring.index(2 * before + 1), sums, is_async=True)
            sums, p0, p1 = warpgroup_mma_wait(0, [sums, p0, p1])
            mbarrier.arrive(v_free.index(before), count=1)

            weight = gl.convert_layout(weight, gl.SliceLayout(1, O))
            mine = UPPER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, O))
            index = local + mine // GROUP
            to = (start + index).to(gl.int64) * out_stride + (head * GROUP + mine % GROUP) * HEAD_DIM
            inside = (index < queries) & (mine < QUERIES * GROUP)
            result = (sums * (1.0 / gl.maximum(weight, 1e-30)).expand_dims(1)).to(out.dtype.element_ty)
            column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, O)).expand_dims(0)
            gl.store(out + to.expand_dims(1) + column, result, mask=inside.expand_dims(1))
