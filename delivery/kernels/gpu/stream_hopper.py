"""Product with a dense weight on Hopper: int8, fp8 or 16-bit, both operands from shared memory.

The same swapped operands and the same ring as w4_hopper.py; here the bulk copies land where `wgmma` reads,
so a consumer's loop is one instruction group and two barriers a step. A step is 128 bytes of K. Row and
column scales are applied to the accumulator at the end; 128 x 128 block scales once per step.
fp8 sums are kept in the tensor cores' own accumulators (fewer mantissa bits than float32).
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
    programs,
    rows_descriptor,
    settled,
    sum_of_splits,
    tile_of,
    tma_load,
    workspace,
    write_tile,
)
from delivery.kernels.tuning import Tile, even_splits, fitting, registers_per_thread


@gluon.jit
def _produce(
    w_desc,
    x_desc,
    w_ring,
    x_ring,
    ready,
    free,
    M,
    N,
    first,
    count,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BYTES: gl.constexpr = (BLOCK_N + BLOCK_M) * 128
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    m, n = tile_of(gl.program_id(0), tiles_m, tiles_n, GROUP_M)
    # Weights do not depend on the kernel before: they are under way before it has ended.
    early = gl.minimum(count, STAGES)
    for i in range(early):
        mbarrier.expect(ready.index(i), BYTES)
        tma_load(w_desc, [n * BLOCK_N, (first + i) * STEP], ready.index(i), w_ring.index(i))
    gdc_wait()
    for i in range(early):
        tma_load(x_desc, [m * BLOCK_M, (first + i) * STEP], ready.index(i), x_ring.index(i))
    stage = early % STAGES
    phase = early // STAGES
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        for i in range(early if tile == gl.program_id(0) else 0, count):
            mbarrier.wait(free.index(stage), phase ^ 1)
            mbarrier.expect(ready.index(stage), BYTES)
            k = (first + i) * STEP
            tma_load(w_desc, [n * BLOCK_N, k], ready.index(stage), w_ring.index(stage))
            tma_load(x_desc, [m * BLOCK_M, k], ready.index(stage), x_ring.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _product(w_ring, x_ring, ready, free, stage, phase, count, zero, STAGES: gl.constexpr):
    """(w · x over `count` steps, next stage, next phase); one product always in flight."""
    mbarrier.wait(ready.index(stage), phase)
    acc = warpgroup_mma(
        w_ring.index(stage), x_ring.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    acc = warpgroup_mma_wait(1, [acc])
    before = stage
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    for _ in range(1, count):
        mbarrier.wait(ready.index(stage), phase)
        acc = warpgroup_mma(w_ring.index(stage), x_ring.index(stage).permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        mbarrier.arrive(free.index(before), count=1)
        before = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(free.index(before), count=1)
    return acc, stage, phase


@gluon.jit
def _block_scaled(w_ring, x_ring, ready, free, stage, phase, count, zero, scale, STAGES: gl.constexpr):
    """The same with float32 `scale` [count] of each step applied to its product."""
    total = zero
    for i in range(count):
        factor = gl.load(scale + i)
        mbarrier.wait(ready.index(stage), phase)
        x = x_ring.index(stage).permute([1, 0])
        acc = warpgroup_mma(w_ring.index(stage), x, zero, use_acc=False, is_async=True)
        total += warpgroup_mma_wait(0, [acc]) * factor
        mbarrier.arrive(free.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return total, stage, phase


@gluon.jit
def _consume(
    w_ring,
    x_ring,
    ready,
    free,
    nothing,
    out,
    w_scale,
    x_scale,
    bias,
    residual,
    partial,
    arrivals,
    M,
    N,
    split,
    splits,
    first,
    count,
    block_columns,
    X_SCALE_STRIDE: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    SCALES: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    WARPS: gl.constexpr,
):
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    K_WIDTH: gl.constexpr = 256 // w_ring.dtype.primitive_bitwidth
    # Triton issues integer products at most 224 wide.
    WIDTH: gl.constexpr = 128 if w_ring.dtype == gl.int8 and BLOCK_M > 128 else BLOCK_M
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, K_WIDTH])
    ACC: gl.constexpr = gl.int32 if w_ring.dtype == gl.int8 else gl.float32
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    zero = gl.zeros([BLOCK_N, BLOCK_M], ACC, LAYOUT)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        m0 = m * BLOCK_M
        n0 = n * BLOCK_N
        if SCALES == "block":
            start = w_scale + (n0 // 128).to(gl.int64) * block_columns + first
            value, stage, phase = _block_scaled(
                w_ring, x_ring, ready, free, stage, phase, count, zero, start, STAGES
            )
        else:
            value, stage, phase = _product(w_ring, x_ring, ready, free, stage, phase, count, zero, STAGES)
            if BLOCK_M < 128:
                value = settled(value, nothing, LAYOUT)
            value = value.to(gl.float32)
        mine = True
        if SHARED_K:
            value, mine = sum_of_splits(
                value, partial, arrivals, tile, split, splits, BLOCK_N, BLOCK_M, LAYOUT
            )
        if mine:
            if SCALES == "row":
                rows = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
                value *= gl.load(w_scale + rows, mask=rows < N, other=0.0).expand_dims(1)
            if SCALES != "none":
                columns = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
                steps = gl.load(x_scale + columns * X_SCALE_STRIDE, mask=columns < M, other=0.0)
                value *= steps.expand_dims(0)
            write_tile(
                value, out, bias, residual, n0, m0, M, N, BIAS, RESIDUAL, LAYOUT, BLOCK_N, BLOCK_M, WARPS
            )


@gluon.jit(do_not_specialize=["M", "steps", "steps_per_split"])
def _kernel(
    w_desc,
    x_desc,
    w_scale,
    x_scale,
    bias,
    residual,
    out,
    partial,
    arrivals,
    M,
    N,
    steps,
    steps_per_split,
    block_columns,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    SCALES: gl.constexpr,
    X_SCALE_STRIDE: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
):
    WARPS: gl.constexpr = gl.num_warps()
    STEP: gl.constexpr = 1024 // w_desc.dtype.primitive_bitwidth
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, STEP], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, STEP], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
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
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    w_ring, x_ring, ready, free, nothing, out, w_scale, x_scale, bias, residual, partial,
                    arrivals, M, N, split, splits, first, count, block_columns,
                    X_SCALE_STRIDE, STAGES, SHARED_K, GROUP_M, SCALES, BIAS, RESIDUAL, WARPS,
                ),
            ),
            (
                _produce,
                (w_desc, x_desc, w_ring, x_ring, ready, free, M, N, first, count, STEP, STAGES, GROUP_M),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: Tile,
    out_dtype: torch.dtype,
    *,
    w_scale: torch.Tensor | None = None,
    blocks: bool = False,
    x_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    resident: bool = True,
) -> torch.Tensor:
    """x [M, K] · weight [N, K]ᵀ, scaled, plus bias and residual, as `out_dtype` [M, N], by one launch.

    x and weight are of one dtype (int8, fp8, fp16, bf16), rows contiguous and 16-byte aligned. w_scale:
    float32 [N] or [N, 1], or [ceil(N/128), ceil(K/128)] for 128-blocks; x_scale: float32 [M, 1] or [1].
    """
    rows, (n, k) = x.shape[0], weight.shape
    step = 128 // x.element_size()
    steps = triton.cdiv(k, step)
    tiles = triton.cdiv(rows, tile.block_m) * triton.cdiv(n, tile.block_n)
    splits, steps_per_split = even_splits(steps, allowed_splits(tile, tiles))
    out = torch.empty(rows, n, dtype=out_dtype, device=x.device)
    stage_bytes = (tile.block_n + tile.block_m) * 128
    tile = fitting(tile, stage_bytes)
    partial, arrivals = workspace(x.device)
    scales = "none" if w_scale is None else "block" if blocks else "row"
    shared_bytes = stage_bytes * tile.stages
    _kernel[(programs(tile, tiles, splits, shared_bytes, x.device), splits)](
        rows_descriptor(weight, tile.block_n, step),
        rows_descriptor(x, tile.block_m, step),
        partial if w_scale is None else w_scale,
        partial if x_scale is None else x_scale,
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        partial,
        arrivals,
        rows,
        n,
        steps,
        steps_per_split,
        1 if scales != "block" or w_scale is None else w_scale.shape[1],
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        STAGES=tile.stages,
        SHARED_K=splits > 1,
        GROUP_M=tile.group_m,
        SCALES=scales,
        X_SCALE_STRIDE=0 if x_scale is None or x_scale.numel() == 1 else 1,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        num_warps=tile.warps,
        maxnreg=registers_per_thread(tile, shared_bytes),
        launch_pdl=resident,
    )
    return out
