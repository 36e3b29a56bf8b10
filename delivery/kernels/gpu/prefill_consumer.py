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
from delivery.kernels.gpu.prefill_order import announced

ROWS = gl.constexpr(64)
"""Rows of a consumer: what one warp group multiplies at once."""
TOKENS = gl.constexpr(64)
"""Tokens that are copied at once; a page has them, or a multiple."""
STEP = gl.constexpr(128)
"""Tokens of a step. A product this wide reads shared memory slower than the tensor cores compute."""
LOWEST = gl.constexpr(-1.0e30)
"""Start of the running maximum: finite, so that a row which sees nothing gives 0 and not NaN."""


@gluon.jit
def _exp2(x):
    """2^x; one instruction, where gl.exp2 keeps denormal results with four."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _here(x):
    """x; what is computed from it is computed here, instead of kept in registers from the start."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


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
def _softmax(scores, most, weight, first, query_position, factor, MASKED: gl.constexpr, S: gl.constexpr):
    """(shares, maximum, weight, what earlier sums fade by); exponents of 2."""
    if MASKED:
        key = first + gl.arange(0, STEP, gl.SliceLayout(0, S)).expand_dims(0)
        scores = gl.where(key <= query_position.expand_dims(1), scores, float("-inf"))
    larger = gl.maximum(most, gl.max(scores, 1) * factor)
    fade = _exp2(most - larger)
    shares = _exp2(scores * factor - larger.expand_dims(1))
    return shares, larger, weight * fade + gl.sum(shares, 1), fade


@gluon.jit
def _products(
    q_tile,
    rings,
    barriers,
    at,
    turn,
    shares,
    sums,
    zero,
    last,
    UPPER: gl.constexpr,
    COPIED: gl.constexpr,
):
    """(scores of a step, sums of the step before still under way). last: the tile's queries are read then."""
    k_ring, v_ring = rings
    k_ready, k_free, v_ready, _v_free, _q_ready, q_free, turns = barriers
    stage, phase, before, before_phase = at
    mbarrier.wait(k_ready.index(stage), phase)
    mbarrier.wait(v_ready.index(before), before_phase)
    # The consumers start their products in turns: one has its softmax while the other multiplies.
    mbarrier.wait(turns.index(UPPER), turn)
    scores = warpgroup_mma(q_tile, k_ring.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True)
    sums = warpgroup_mma(shares, v_ring.index(before), sums, is_async=True)
    mbarrier.arrive(turns.index(1 - UPPER), count=1)
    scores = warpgroup_mma_wait(1, [scores])
    mbarrier.arrive(k_free.index(stage), count=1)
    if COPIED:  # noqa: SIM102 (decided when compiled; the other when run)
        if last:
            mbarrier.arrive(q_free.index(UPPER), count=1)
    return scores, sums


@gluon.jit
def _finished(sums, shares, scores, barriers, at, begun):
    """(sums of the step before, scores). begun: there is a step before."""
    _k_ready, _k_free, _v_ready, v_free, _q_ready, _q_free, _turns = barriers
    # The shares are named in the wait, so that their registers are not written while a product reads them;
    # the scores, so that their exponentials stand in front of it.
    sums, shares, scores = warpgroup_mma_wait(0, [sums, shares, scores])
    mbarrier.arrive(v_free.index(at[2]), count=1, pred=begun)
    return sums, scores


@gluon.jit
def _step(
    q_tile,
    rings,
    barriers,
    at,
    turn,
    shares,
    sums,
    most,
    weight,
    first,
    query_position,
    factor,
    zero,
    UPPER: gl.constexpr,
    MASKED: gl.constexpr,
    COPIED: gl.constexpr,
    S: gl.constexpr,
    O: gl.constexpr,  # noqa: E741
):
    """A step of a tile behind its first: (shares, sums, maximum, weight)."""
    scores, sums = _products(q_tile, rings, barriers, at, turn, shares, sums, zero, first == 0, UPPER, COPIED)
    scores, most, weight, fade = _softmax(scores, most, weight, first, query_position, factor, MASKED, S)
    sums, scores = _finished(sums, shares, scores, barriers, at, True)
    sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, O)).expand_dims(1)
    return _operand(scores, q_tile.dtype, gl.DotOperandLayout(0, O, 2)), sums, most, weight


@gluon.jit
def _last_sums(rings, barriers, at, shares, sums):
    """The sums of the step before, where no scores stand beside them."""
    _k_ring, v_ring = rings
    _k_ready, _k_free, v_ready, v_free, _q_ready, _q_free, _turns = barriers
    _stage, _phase, before, before_phase = at
    mbarrier.wait(v_ready.index(before), before_phase)
    sums = warpgroup_mma(shares, v_ring.index(before), sums, is_async=True)
    sums, shares = warpgroup_mma_wait(0, [sums, shares])
    mbarrier.arrive(v_free.index(before), count=1)
    return sums


@gluon.jit
def _next(at, STAGES: gl.constexpr):
    """(stage and phase of the next step, those of this one)."""
    stage, phase, _before, _before_phase = at
    before = stage
    before_phase = phase
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase, before, before_phase


@gluon.jit
def _write(
    out,
    to,
    left,
    out_stride,
    sums,
    weight,
    UPPER: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    O: gl.constexpr,  # noqa: E741
):
    """A tile's results to `out` from element `to` on; its first `left` queries are there."""
    weight = gl.convert_layout(weight, gl.SliceLayout(1, O))
    mine = UPPER * ROWS + _here(gl.arange(0, ROWS, gl.SliceLayout(1, O)))
    index = mine // GROUP
    at = to + index * out_stride + (mine % GROUP) * HEAD_DIM
    inside = (index < left) & (mine < QUERIES * GROUP)
    result = (sums * (1.0 / gl.maximum(weight, 1e-30)).expand_dims(1)).to(out.dtype.element_ty)
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, O)).expand_dims(0)
    gl.store(out + at.expand_dims(1) + column, result, mask=inside.expand_dims(1))


@gluon.jit
def consume(
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
    COPIED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """COPIED: pages and queries come as they are, and steps follow one another without a break: the first
    scores of a tile start beside the last sums of the tile before, whose results are written while the other
    consumer multiplies. Otherwise there are no registers for that, and a tile is finished before the next."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # noqa: E741
    A: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    k_ring, v_ring = rings
    k_ready, k_free, v_ready, _v_free, q_ready, _q_free, _turns = barriers
    dtype: gl.constexpr = q_tile.dtype
    zero = gl.zeros([ROWS, STEP], gl.float32, S)
    if COPIED:
        # Before the first tile stands one of no queries, whose shares are zero.
        shares = gl.zeros([ROWS, STEP], dtype, A)
        sums = gl.zeros([ROWS, HEAD_DIM], gl.float32, O)
        weight = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        to = 0
        left = 0
    at = (0, 0, 0, 0)
    turn = 1 - UPPER
    number = 0
    row, there, lowest, head, steps = announced(notes, 0)
    while steps > 0:
        if COPIED:
            mbarrier.wait(q_ready.index(UPPER), number % 2)
        else:
            mine = UPPER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
            own = (row + mine // GROUP) * q_stride + (head * GROUP + mine % GROUP) * HEAD_DIM
            inside = (mine // GROUP < there) & (mine < QUERIES * GROUP)
            column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, WIDE)).expand_dims(0)
            loaded = gl.load(q + own.expand_dims(1) + column, mask=inside.expand_dims(1), other=0.0)
            barrier()  # every warp is done with the tile before
            q_tile.store(loaded.to(dtype))
            fence_async_shared()
            barrier()
        next_to = row * out_stride + head * (GROUP * HEAD_DIM)
        mine = UPPER * ROWS + _here(gl.arange(0, ROWS, gl.SliceLayout(1, S)))
        query_position = lowest + mine // GROUP
        # Steps that every row sees whole; `lowest` is negative where there is no context.
        open_steps = gl.minimum(gl.maximum(lowest + 1, 0) // STEP, steps - 1)
        first = (steps - 1) * STEP
        most = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, S))
        nothing = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        if COPIED:
            scores, sums = _products(
                q_tile, rings, barriers, at, turn, shares, sums, zero, steps == 1, UPPER, COPIED
            )
            scores, most, tile_weight, _fade = _softmax(
                scores, most, nothing, first, query_position, factor, True, S
            )
            sums, scores = _finished(sums, shares, scores, barriers, at, left > 0)
            _write(out, to, left, out_stride, sums, weight, UPPER, GROUP, HEAD_DIM, QUERIES, O)
            weight = tile_weight
            turn ^= 1
        else:
            mbarrier.wait(k_ready.index(at[0]), at[1])
            keys = k_ring.index(at[0]).permute([1, 0])
            scores = warpgroup_mma(q_tile, keys, zero, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(k_free.index(at[0]), count=1)
            scores, most, weight, _fade = _softmax(
                scores, most, nothing, first, query_position, factor, True, S
            )
        shares = _operand(scores, dtype, A)
        sums = gl.zeros([ROWS, HEAD_DIM], gl.float32, O)
        to = next_to
        left = there
        if COPIED:  # noqa: SIM102 (decided when compiled; the other when run)
            if first + STEP > lowest + there:
                # Memory behind a sequence's end may hold anything, and 0 · NaN is NaN. Both consumers
                # write the same zeros, and the values in front as they are.
                mbarrier.wait(v_ready.index(at[0]), at[1])
                PART: gl.constexpr = 32
                for part in gl.static_range(STEP // PART):
                    token = first + part * PART + gl.arange(0, PART, gl.SliceLayout(1, WIDE))
                    values = v_ring.index(at[0]).slice(part * PART, PART)
                    kept = (token < lowest + there).expand_dims(1)
                    values.store(gl.where(kept, values.load(WIDE), 0.0))
                fence_async_shared()
                barrier()
        at = _next(at, STAGES)
        for _ in range(open_steps, steps - 1):
            first -= STEP
            shares, sums, most, weight = _step(
                q_tile, rings, barriers, at, turn, shares, sums, most, weight, first, query_position,
                factor, zero, UPPER, True, COPIED, S, O,
            )  # fmt: skip
            turn ^= 1
            at = _next(at, STAGES)
        for _ in range(open_steps):
            first -= STEP
            shares, sums, most, weight = _step(
                q_tile, rings, barriers, at, turn, shares, sums, most, weight, first, query_position,
                factor, zero, UPPER, False, COPIED, S, O,
            )  # fmt: skip
            turn ^= 1
            at = _next(at, STAGES)
        if not COPIED:
            sums = _last_sums(rings, barriers, at, shares, sums)
            _write(out, to, left, out_stride, sums, weight, UPPER, GROUP, HEAD_DIM, QUERIES, O)
        number += 1
        row, there, lowest, head, steps = announced(notes, number)
    if COPIED:  # noqa: SIM102
        if left > 0:
            sums = _last_sums(rings, barriers, at, shares, sums)
            _write(out, to, left, out_stride, sums, weight, UPPER, GROUP, HEAD_DIM, QUERIES, O)
