"""One step of prefill_hopper.py's consumers: products and online softmax of 64 rows with 128 keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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
def here(x):
    """x; what is computed from it is computed here, instead of kept in registers from the start."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def operand(x, dtype: gl.constexpr, A: gl.constexpr):
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
def softmax(scores, most, weight, first, query_position, factor, MASKED: gl.constexpr, S: gl.constexpr):
    """(shares, maximum, weight, what earlier sums fade by); exponents of 2."""
    if MASKED:
        key = first + gl.arange(0, STEP, gl.SliceLayout(0, S)).expand_dims(0)
        scores = gl.where(key <= query_position.expand_dims(1), scores, float("-inf"))
    larger = gl.maximum(most, gl.max(scores, 1) * factor)
    fade = _exp2(most - larger)
    shares = _exp2(scores * factor - larger.expand_dims(1))
    return shares, larger, weight * fade + gl.sum(shares, 1), fade


@gluon.jit
def products(
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
def finished(sums, shares, scores, barriers, at, begun):
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
    scores, sums = products(q_tile, rings, barriers, at, turn, shares, sums, zero, first == 0, UPPER, COPIED)
    scores, most, weight, fade = softmax(scores, most, weight, first, query_position, factor, MASKED, S)
    sums, scores = finished(sums, shares, scores, barriers, at, True)
    sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, O)).expand_dims(1)
    return operand(scores, q_tile.dtype, gl.DotOperandLayout(0, O, 2)), sums, most, weight


@gluon.jit
def further_steps(
    q_tile,
    rings,
    barriers,
    at,
    turn,
    shares,
    sums,
    most,
    weight,
    steps,
    lowest,
    query_position,
    factor,
    zero,
    UPPER: gl.constexpr,
    COPIED: gl.constexpr,
    STAGES: gl.constexpr,
    S: gl.constexpr,
    O: gl.constexpr,  # noqa: E741
):
    """A tile's steps behind its first, masked ones before open ones: (shares, sums, weight, at, turn)."""
    # Steps that every row sees whole; `lowest` is negative where there is no context.
    open_steps = gl.minimum(gl.maximum(lowest + 1, 0) // STEP, steps - 1)
    first = (steps - 1) * STEP
    for _ in range(open_steps, steps - 1):
        first -= STEP
        shares, sums, most, weight = _step(
            q_tile, rings, barriers, at, turn, shares, sums, most, weight, first, query_position,
            factor, zero, UPPER, True, COPIED, S, O,
        )  # fmt: skip
        turn ^= 1
        at = next_step(at, STAGES)
    for _ in range(open_steps):
        first -= STEP
        shares, sums, most, weight = _step(
            q_tile, rings, barriers, at, turn, shares, sums, most, weight, first, query_position,
            factor, zero, UPPER, False, COPIED, S, O,
        )  # fmt: skip
        turn ^= 1
        at = next_step(at, STAGES)
    return shares, sums, weight, at, turn


@gluon.jit
def last_sums(rings, barriers, at, shares, sums):
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
def next_step(at, STAGES: gl.constexpr):
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
def write(
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
    mine = UPPER * ROWS + here(gl.arange(0, ROWS, gl.SliceLayout(1, O)))
    index = mine // GROUP
    at = to + index * out_stride + (mine % GROUP) * HEAD_DIM
    inside = (index < left) & (mine < QUERIES * GROUP)
    result = (sums * (1.0 / gl.maximum(weight, 1e-30)).expand_dims(1)).to(out.dtype.element_ty)
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, O)).expand_dims(0)
    gl.store(out + at.expand_dims(1) + column, result, mask=inside.expand_dims(1))
