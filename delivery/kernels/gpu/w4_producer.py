"""The producer of w4_hopper.py: one warp that keeps the ring of words, scales and activations full."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from delivery.kernels.gpu.hopper import gdc_wait, tile_of, tma_load


@gluon.jit
def _weights(
    w_desc,
    s_desc,
    z_desc,
    rings,
    ready,
    stage,
    w_row,
    n0,
    N_PAD,
    step,
    GROUPS: gl.constexpr,
    ZERO: gl.constexpr,
):
    w_ring, _, s_ring, z_ring = rings
    PITCH: gl.constexpr = 128 // s_ring.shape[1] if s_ring.shape[1] < 128 else 1
    full = ready.index(stage)
    tma_load(w_desc, [w_row + step * 128, 0], full, w_ring.index(stage))
    for g in gl.static_range(GROUPS):
        at = (step * GROUPS + g) * N_PAD + n0
        tma_load(s_desc, [at], full, s_ring.index(stage * GROUPS + g))
        if ZERO:
            tma_load(z_desc, [at], full, z_ring.index((stage * GROUPS + g) * PITCH))


@gluon.jit
def _activations(x_desc, rings, ready, stage, m0, step, CHUNKS: gl.constexpr):
    WIDTH: gl.constexpr = 128 // CHUNKS
    for c in gl.static_range(CHUNKS):
        where = [m0, step * 128 + c * WIDTH]
        tma_load(x_desc, where, ready.index(stage), rings[1].index(stage * CHUNKS + c))


@gluon.jit
def produce(
    w_desc,
    x_desc,
    s_desc,
    z_desc,
    rings,
    ready,
    free,
    M,
    N,
    N_PAD,
    steps,
    first,
    count,
    BYTES: gl.constexpr,
    STAGES: gl.constexpr,
    CHUNKS: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP_M: gl.constexpr,
    ZERO: gl.constexpr,
):
    BLOCK_N: gl.constexpr = rings[0].shape[1] * 2
    BLOCK_M: gl.constexpr = rings[1].shape[1]
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tile = gl.program_id(0)
    m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
    w_row = _first_row(n, steps, BLOCK_N)
    # Weights do not depend on the kernel before: they are under way before it has ended.
    early = gl.minimum(count, STAGES)
    for i in range(early):
        mbarrier.expect(ready.index(i), BYTES)
        _weights(w_desc, s_desc, z_desc, rings, ready, i, w_row, n * BLOCK_N, N_PAD, first + i, GROUPS, ZERO)
    gdc_wait()
    for i in range(early):
        _activations(x_desc, rings, ready, i, m * BLOCK_M, first + i, CHUNKS)
    stage = early % STAGES
    phase = early // STAGES
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        w_row = _first_row(n, steps, BLOCK_N)
        for i in range(early if tile == gl.program_id(0) else 0, count):
            mbarrier.wait(free.index(stage), phase ^ 1)
            mbarrier.expect(ready.index(stage), BYTES)
            step = first + i
            _weights(
                w_desc, s_desc, z_desc, rings, ready, stage, w_row, n * BLOCK_N, N_PAD, step, GROUPS, ZERO
            )
            _activations(x_desc, rings, ready, stage, m * BLOCK_M, step, CHUNKS)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _first_row(n, steps, BLOCK_N: gl.constexpr):
    """Row of the words [·, 32] at which output feature tile n begins."""
    PER_TILE: gl.constexpr = 256 // BLOCK_N
    return n // PER_TILE * steps * 128 + n % PER_TILE * (BLOCK_N // 2)
