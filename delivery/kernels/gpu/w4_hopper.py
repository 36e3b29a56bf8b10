"""4-bit weight x 16-bit activations on Hopper: weights stream once, become operand A in registers.

Swapped operands: the 64-row side of `wgmma` takes output features and the side that can be 8 narrow takes
rows of x, so one row costs one eighth of a tile. Per 128 input features a thread reads its words with
16-byte accesses, unpacks them (w4_fragment.py) and multiplies while the next step's words are unpacked.
Scales act either on the accumulator, once per group (few rows), or on the unpacked weights (many rows).
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from delivery.kernels.gpu.hopper import (
    allowed_splits,
    gdc_wait,
    line_descriptor,
    rows_descriptor,
    sum_of_splits,
    tile_of,
    tma_load,
    workspace,
    write_tile,
)
from delivery.kernels.gpu.w4_fragment import chunk_of, fragment, words_of
from delivery.kernels.tuning import Tile, even_splits, registers_per_thread
from delivery.kernels.w4_layout import TILE_K, PackedW4


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
    full = ready.index(stage)
    tma_load(w_desc, [w_row + step * 128, 0], full, w_ring.index(stage))
    for g in gl.static_range(GROUPS):
        at = (step * GROUPS + g) * N_PAD + n0
        tma_load(s_desc, [at], full, s_ring.index(stage * GROUPS + g))
        if ZERO:
            tma_load(z_desc, [at], full, z_ring.index(stage * GROUPS + g))


@gluon.jit
def _activations(x_desc, rings, ready, stage, m0, step, CHUNKS: gl.constexpr):
    WIDTH: gl.constexpr = 128 // CHUNKS
    for c in gl.static_range(CHUNKS):
        where = [m0, step * 128 + c * WIDTH]
        tma_load(x_desc, where, ready.index(stage), rings[1].index(stage * CHUNKS + c))


@gluon.jit
def _produce(
    w_desc,
    x_desc,
    s_desc,
    z_desc,
    rings,
    ready,
    free,
    w_row,
    m0,
    n0,
    N_PAD,
    first,
    count,
    BYTES: gl.constexpr,
    STAGES: gl.constexpr,
    CHUNKS: gl.constexpr,
    GROUPS: gl.constexpr,
    ZERO: gl.constexpr,
):
    # Weights do not depend on the kernel before: they are under way before it has ended.
    for i in range(gl.minimum(count, STAGES)):
        mbarrier.expect(ready.index(i), BYTES)
        _weights(w_desc, s_desc, z_desc, rings, ready, i, w_row, n0, N_PAD, first + i, GROUPS, ZERO)
    gdc_wait()
    for i in range(gl.minimum(count, STAGES)):
        _activations(x_desc, rings, ready, i, m0, first + i, CHUNKS)
    stage = 0
    phase = 0
    for i in range(STAGES, count):
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(ready.index(stage), BYTES)
        _weights(w_desc, s_desc, z_desc, rings, ready, stage, w_row, n0, N_PAD, first + i, GROUPS, ZERO)
        _activations(x_desc, rings, ready, stage, m0, first + i, CHUNKS)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _operand(
    rings,
    words,
    stage,
    C: gl.constexpr,
    CHUNKS: gl.constexpr,
    GROUPS: gl.constexpr,
    ZERO: gl.constexpr,
    SCALED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
    DTYPE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """(operand A of chunk C, its scales as float32)."""
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    at = stage * GROUPS + C * GROUPS // CHUNKS
    if ZERO:
        zero = rings[3].index(at).load(ROWS).to(gl.int32)
    else:
        zero = gl.full([BLOCK_N], 8, gl.int32, ROWS)
    scale = rings[2].index(at).load(ROWS)
    a = fragment(
        chunk_of(words, C, CHUNKS, BLOCK_N, WARPS),
        zero,
        scale.to(DTYPE),
        CHUNKS,
        BLOCK_N,
        WARPS,
        SCALED,
        DTYPE,
        gl.DotOperandLayout(0, LAYOUT, 2),
    )
    return a, scale.to(gl.float32)


@gluon.jit
def _consume(
    rings,
    ready,
    free,
    out,
    bias,
    partial,
    arrivals,
    M,
    N,
    m0,
    n0,
    tile,
    split,
    splits,
    count,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED_K: gl.constexpr,
    CHUNKS: gl.constexpr,
    GROUPS: gl.constexpr,
    ZERO: gl.constexpr,
    SCALED: gl.constexpr,
    BIAS: gl.constexpr,
    WARPS: gl.constexpr,
):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    x_ring = rings[1]
    DTYPE: gl.constexpr = x_ring.dtype
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, LAYOUT)
    total = zero
    # The first product stands outside the loop, so that its accumulator is born in the tensor cores.
    mbarrier.wait(ready.index(0), 0)
    words = words_of(rings[0].index(0), BLOCK_N, WARPS)
    a, scale = _operand(rings, words, 0, 0, CHUNKS, GROUPS, ZERO, SCALED, BLOCK_N, WARPS, DTYPE, LAYOUT)
    acc = warpgroup_mma(a, x_ring.index(0).permute([1, 0]), zero, use_acc=False, is_async=True)
    for c in gl.static_range(1, CHUNKS):
        a, after = _operand(rings, words, 0, c, CHUNKS, GROUPS, ZERO, SCALED, BLOCK_N, WARPS, DTYPE, LAYOUT)
        done = warpgroup_mma_wait(0, [acc])
        if not SCALED:
            total += done * scale.expand_dims(1)
            done = zero
        acc = warpgroup_mma(a, x_ring.index(c).permute([1, 0]), done, use_acc=SCALED, is_async=True)
        scale = after
    stage = 1 % STAGES
    phase = 0
    before = 0
    for _ in range(1, count):
        mbarrier.wait(ready.index(stage), phase)
        words = words_of(rings[0].index(stage), BLOCK_N, WARPS)
        for c in gl.static_range(CHUNKS):
            a, after = _operand(
                rings, words, stage, c, CHUNKS, GROUPS, ZERO, SCALED, BLOCK_N, WARPS, DTYPE, LAYOUT
            )
            done = warpgroup_mma_wait(0, [acc])
            if not SCALED:
                total += done * scale.expand_dims(1)
                done = zero
            if c == 0:
                mbarrier.arrive(free.index(before), count=1)
            x = x_ring.index(stage * CHUNKS + c).permute([1, 0])
            acc = warpgroup_mma(a, x, done, use_acc=SCALED, is_async=True)
            scale = after
        before = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    done = warpgroup_mma_wait(0, [acc])
    if SCALED:
        total = done
    else:
        total += done * scale.expand_dims(1)
    if not SHARED_K:
        write_tile(total, out, bias, out, n0, m0, M, N, BIAS, False, LAYOUT, BLOCK_N, BLOCK_M)
    else:
        total, last = sum_of_splits(total, partial, arrivals, tile, split, splits, BLOCK_N, BLOCK_M, LAYOUT)
        if last:
            write_tile(total, out, bias, out, n0, m0, M, N, BIAS, False, LAYOUT, BLOCK_N, BLOCK_M)


@gluon.jit(do_not_specialize=["M", "steps", "steps_per_split"])
def _kernel(
    w_desc,
    x_desc,
    s_desc,
    z_desc,
    bias,
    out,
    partial,
    arrivals,
    M,
    N,
    N_PAD,
    steps,
    steps_per_split,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED_K: gl.constexpr,
    CHUNKS: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP_M: gl.constexpr,
    ZERO: gl.constexpr,
    SCALED: gl.constexpr,
    BIAS: gl.constexpr,
):
    WARPS: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = 128 // CHUNKS
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N // 2, 32], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES * CHUNKS, BLOCK_M, WIDTH], x_desc.layout)
    s_ring = gl.allocate_shared_memory(s_desc.dtype, [STAGES * GROUPS, BLOCK_N], s_desc.layout)
    z_ring = gl.allocate_shared_memory(gl.uint8, [STAGES * GROUPS, BLOCK_N], z_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    SCALE_BYTES: gl.constexpr = s_desc.dtype.primitive_bitwidth // 8 + (1 if ZERO else 0)
    BYTES: gl.constexpr = BLOCK_N * 64 + BLOCK_M * 256 + BLOCK_N * GROUPS * SCALE_BYTES
    m, n = tile_of(gl.program_id(0), (M + BLOCK_M - 1) // BLOCK_M, (N + BLOCK_N - 1) // BLOCK_N, GROUP_M)
    tile = gl.program_id(0)
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    first = split * steps_per_split
    count = gl.minimum(steps - first, steps_per_split)
    PER_TILE: gl.constexpr = 256 // BLOCK_N
    w_row = n // PER_TILE * steps * 128 + n % PER_TILE * (BLOCK_N // 2)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    rings = (w_ring, x_ring, s_ring, z_ring)
    m0 = m * BLOCK_M
    n0 = n * BLOCK_N
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    rings,
                    ready,
                    free,
                    out,
                    bias,
                    partial,
                    arrivals,
                    M,
                    N,
                    m0,
                    n0,
                    tile,
                    split,
                    splits,
                    count,
                    BLOCK_N,
                    BLOCK_M,
                    STAGES,
                    SHARED_K,
                    CHUNKS,
                    GROUPS,
                    ZERO,
                    SCALED,
                    BIAS,
                    WARPS,
                ),
            ),
            (
                _produce,
                (
                    w_desc,
                    x_desc,
                    s_desc,
                    z_desc,
                    rings,
                    ready,
                    free,
                    w_row,
                    m0,
                    n0,
                    N_PAD,
                    first,
                    count,
                    BYTES,
                    STAGES,
                    CHUNKS,
                    GROUPS,
                    ZERO,
                ),
            ),
        ],
        [1],
        [24],
    )


def product(x: torch.Tensor, packed: PackedW4, bias: torch.Tensor | None, tile: Tile) -> torch.Tensor:
    """x [M, K] · weightᵀ + bias by one launch; see `why_not` in linear_w4a16.py for what x must be."""
    rows, (n, _) = x.shape[0], packed.shape
    steps = packed.words.shape[1]
    groups = TILE_K // packed.group_size
    chunks = max(groups, 2 if tile.block_n > 32 * tile.warps // 2 else 1)
    tiles = triton.cdiv(rows, tile.block_m) * triton.cdiv(n, tile.block_n)
    splits, steps_per_split = even_splits(steps, allowed_splits(tile, tiles))
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    scale_bytes = packed.scale.element_size() + 1
    stage_bytes = tile.block_n * 64 + tile.block_m * 256 + tile.block_n * groups * scale_bytes
    partial, arrivals = workspace(x.device)
    zero_point = packed.words.view(torch.uint8) if packed.zero_point is None else packed.zero_point
    _kernel[(tiles, splits)](
        rows_descriptor(packed.words.view(-1, 32), tile.block_n // 2, 32),
        rows_descriptor(x, tile.block_m, TILE_K // chunks),
        line_descriptor(packed.scale, tile.block_n),
        line_descriptor(zero_point, tile.block_n),
        out if bias is None else bias,
        out,
        partial,
        arrivals,
        rows,
        n,
        packed.scale.shape[1],
        steps,
        steps_per_split,
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        STAGES=tile.stages,
        SHARED_K=splits > 1,
        CHUNKS=chunks,
        GROUPS=groups,
        GROUP_M=tile.group_m,
        ZERO=packed.zero_point is not None,
        SCALED=tile.scale_weights,
        BIAS=bias is not None,
        num_warps=tile.warps,
        maxnreg=registers_per_thread(tile, stage_bytes * tile.stages),
        launch_pdl=packed.resident,
    )
    return out
