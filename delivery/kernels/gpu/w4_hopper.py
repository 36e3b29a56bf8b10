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
    line_descriptor,
    programs,
    rows_descriptor,
    settled,
    sum_of_splits,
    tile_of,
    workspace,
    write_tile,
)
from delivery.kernels.gpu.w4_fragment import chunk_of, fragment, words_of
from delivery.kernels.gpu.w4_producer import produce
from delivery.kernels.tuning import Tile, even_splits, fitting, registers_per_thread
from delivery.kernels.w4_layout import TILE_K, PackedW4


@gluon.jit
def _group(rings, at, ZERO: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """(zero points as int32, scales) [BLOCK_N] of a group."""
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if ZERO:
        PITCH: gl.constexpr = 128 // BLOCK_N if BLOCK_N < 128 else 1
        zero = rings[3].index(at * PITCH).load(ROWS).to(gl.int32)
    else:
        zero = gl.full([BLOCK_N], 8, gl.int32, ROWS)
    return zero, rings[2].index(at).load(ROWS)


@gluon.jit
def _step(
    rings,
    free,
    stage,
    before,
    acc,
    a_first,
    a_before,
    scale_before,
    total,
    nought,
    FIRST: gl.constexpr,
    CHUNKS: gl.constexpr,
    GROUPS: gl.constexpr,
    ZERO: gl.constexpr,
    SCALED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """128 input features: per chunk unpack, start its product, and see the one before it ended.

    Without SCALED a group's chunks add up in the tensor cores, and the sum is scaled when the next group's
    first chunk is ready. A product reads operand A from registers while it runs. Naming them in the wait
    keeps the registers from being written for a later chunk any earlier; the compiler does not see that
    they are still read. What else a wait names is to be had before it, or used behind it alone.
    """
    x_ring = rings[1]
    DTYPE: gl.constexpr = x_ring.dtype
    PER_GROUP: gl.constexpr = CHUNKS // GROUPS
    PAIRS: gl.constexpr = PER_GROUP == 2 and not SCALED
    words = words_of(rings[0].index(stage), BLOCK_N, WARPS)
    for c in gl.static_range(CHUNKS):
        if c % PER_GROUP == 0:
            zero, scale = _group(rings, stage * GROUPS + c // PER_GROUP, ZERO, BLOCK_N, LAYOUT)
        if PAIRS and c == 0 and not FIRST:
            acc, a_first, words = warpgroup_mma_wait(1, [acc, a_first, words])
        a = fragment(
            chunk_of(words, c, CHUNKS, BLOCK_N, WARPS),
            zero,
            scale.to(DTYPE),
            CHUNKS,
            BLOCK_N,
            WARPS,
            SCALED,
            DTYPE,
            gl.DotOperandLayout(0, LAYOUT, 2),
        )
        x = x_ring.index(stage * CHUNKS + c).permute([1, 0])
        if FIRST and c == 0:
            acc = warpgroup_mma(a, x, nought, use_acc=False, is_async=True)
        elif SCALED:
            acc = warpgroup_mma(a, x, acc, is_async=True)
            acc, a_before = warpgroup_mma_wait(1, [acc, a_before])
        elif c % PER_GROUP:
            acc = warpgroup_mma(a, x, acc, is_async=True)
        else:
            done, a_before, a = warpgroup_mma_wait(0, [acc, a_before, a])
            total += done * scale_before.expand_dims(1)
            acc = warpgroup_mma(a, x, nought, use_acc=False, is_async=True)
        if c == 0 and not FIRST:
            mbarrier.arrive(free.index(before), count=1)
        if PAIRS and c == 0:
            a_first = a
        else:
            a_before = a
        scale_before = scale.to(gl.float32)
    return acc, a_first, a_before, scale_before, total


@gluon.jit
def _consume(
    rings,
    ready,
    free,
    nothing,
    out,
    bias,
    partial,
    arrivals,
    M,
    N,
    split,
    splits,
    count,
    STAGES: gl.constexpr,
    SHARED_K: gl.constexpr,
    CHUNKS: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP_M: gl.constexpr,
    ZERO: gl.constexpr,
    SCALED: gl.constexpr,
    BIAS: gl.constexpr,
    WARPS: gl.constexpr,
):
    BLOCK_N: gl.constexpr = rings[0].shape[1] * 2
    BLOCK_M: gl.constexpr = rings[1].shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, LAYOUT)
    no_a = gl.zeros([BLOCK_N, 128 // CHUNKS], rings[1].dtype, gl.DotOperandLayout(0, LAYOUT, 2))
    no_scale = gl.zeros([BLOCK_N], gl.float32, ROWS)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        m0 = m * BLOCK_M
        n0 = n * BLOCK_N
        # The first step stands outside the loop, so that its accumulator is born in the tensor cores.
        mbarrier.wait(ready.index(stage), phase)
        acc, a_first, a, scale, total = _step(
            rings, free, stage, stage, zero, no_a, no_a, no_scale, zero, zero,
            True, CHUNKS, GROUPS, ZERO, SCALED, BLOCK_N, WARPS, LAYOUT,
        )  # fmt: skip
        before = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
        for _ in range(1, count):
            mbarrier.wait(ready.index(stage), phase)
            acc, a_first, a, scale, total = _step(
                rings, free, stage, before, acc, a_first, a, scale, total, zero,
                False, CHUNKS, GROUPS, ZERO, SCALED, BLOCK_N, WARPS, LAYOUT,
            )  # fmt: skip
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        done, a_first, a = warpgroup_mma_wait(0, [acc, a_first, a])
        mbarrier.arrive(free.index(before), count=1)
        if SCALED:
            total = settled(done, nothing, LAYOUT) if BLOCK_M < 128 else done
        else:
            total += done * scale.expand_dims(1)
        mine = True
        if SHARED_K:
            total, mine = sum_of_splits(
                total, partial, arrivals, tile, split, splits, BLOCK_N, BLOCK_M, LAYOUT
            )
        if mine:
            write_tile(total, out, bias, out, n0, m0, M, N, BIAS, False, LAYOUT, BLOCK_N, BLOCK_M, WARPS)


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
    # A bulk copy lands on a multiple of 128 bytes: 64 zero points leave a gap behind them.
    PITCH: gl.constexpr = 128 // BLOCK_N if BLOCK_N < 128 else 1
    z_ring = gl.allocate_shared_memory(gl.uint8, [STAGES * GROUPS * PITCH, BLOCK_N], z_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    SCALE_BYTES: gl.constexpr = s_desc.dtype.primitive_bitwidth // 8 + (1 if ZERO else 0)
    BYTES: gl.constexpr = BLOCK_N * 64 + BLOCK_M * 256 + BLOCK_N * GROUPS * SCALE_BYTES
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    first = split * steps_per_split
    count = gl.minimum(steps - first, steps_per_split)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    nothing = gl.allocate_shared_memory(gl.int32, [BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    nothing.store(gl.zeros([BLOCK_N], gl.int32, LINE))
    fence_async_shared()
    gdc_launch_dependents()
    rings = (w_ring, x_ring, s_ring, z_ring)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    rings, ready, free, nothing, out, bias, partial, arrivals, M, N, split, splits, count,
                    STAGES, SHARED_K, CHUNKS, GROUPS, GROUP_M, ZERO, SCALED, BIAS, WARPS,
                ),
            ),
            (
                produce,
                (
                    w_desc, x_desc, s_desc, z_desc, rings, ready, free, M, N, N_PAD, steps, first, count,
                    BYTES, STAGES, CHUNKS, GROUPS, GROUP_M, ZERO,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


def product(x: torch.Tensor, packed: PackedW4, bias: torch.Tensor | None, tile: Tile) -> torch.Tensor:
    """x [M, K] · weightᵀ + bias by one launch; see `why_not` in linear_w4a16.py for what x must be."""
    rows, (n, _) = x.shape[0], packed.shape
    steps = packed.words.shape[1]
    groups = TILE_K // packed.group_size
    chunks = max(groups, 2)
    tiles = triton.cdiv(rows, tile.block_m) * triton.cdiv(n, tile.block_n)
    splits, steps_per_split = even_splits(steps, allowed_splits(tile, tiles))
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    scale_bytes = packed.scale.element_size() + max(1, 128 // tile.block_n)
    stage_bytes = tile.block_n * 64 + tile.block_m * 256 + tile.block_n * groups * scale_bytes
    tile = fitting(tile, stage_bytes)
    partial, arrivals = workspace(x.device)
    zero_point = packed.words.view(torch.uint8) if packed.zero_point is None else packed.zero_point
    shared_bytes = stage_bytes * tile.stages
    _kernel[(programs(tile, tiles, splits, shared_bytes, x.device), splits)](
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
        maxnreg=registers_per_thread(tile, shared_bytes),
        launch_pdl=packed.resident,
    )
    return out
