"""What the Hopper kernels share: names that moved between Triton versions, tile order, split-K.

The kernels are Gluon programs (Triton's explicit form): a producer warp streams tiles through a ring in
shared memory with the bulk copy engine, consumer warps feed the tensor cores. Gluon is still marked
experimental, so everything here is behind `why_not`, and each operator has another backend.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from delivery.kernels.targets import multiprocessors
from delivery.kernels.tuning import Tile, programs_per_multiprocessor

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

WORKSPACE_BYTES = 32 << 20
MAX_TILES = 8192
MAX_SPLITS = gl.constexpr(8)


@cache
def workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 partial sums, int32 arrival counters at zero) of a device, made once.

    One stream at a time may use them: kernels that run side by side on a device would mix their sums.
    """
    partial = torch.empty(WORKSPACE_BYTES // 4, dtype=torch.float32, device=device)
    return partial, torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def allowed_splits(tile: Tile, tiles: int) -> int:
    """tile.splits, or 1 where the sums of `tiles` tiles would not fit the workspace."""
    if tile.splits > MAX_SPLITS.value:
        raise ValueError(f"{tile.splits} splits, at most {MAX_SPLITS.value}")
    sums_bytes = tiles * tile.splits * tile.block_n * tile.block_m * 4
    return tile.splits if tiles <= MAX_TILES and sums_bytes <= WORKSPACE_BYTES else 1


def programs(tile: Tile, tiles: int, splits: int, shared_bytes: int, device: torch.device) -> int:
    """How many programs to start for `tiles` tiles: as many as run at once, each then takes several."""
    if splits > 1:
        return tiles
    return min(tiles, multiprocessors(device) * programs_per_multiprocessor(tile, shared_bytes))


def rows_descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A bulk-copy view of a 2-D tensor in boxes [rows, columns]; beyond its edge a box reads zero."""
    bits = tensor.element_size() * 8
    width = min(128, columns * bits // 8)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=bits, rank=2)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], layout)


def line_descriptor(tensor: torch.Tensor, columns: int) -> TensorDescriptor:
    """A bulk-copy view of a contiguous tensor as one line, in pieces of `columns` elements."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=tensor.element_size() * 8, rank=1)
    flat = tensor.view(-1)
    return TensorDescriptor(flat, [flat.numel()], [1], [columns], layout)


@gluon.jit
def tile_of(program, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """(m, n) of a program: GROUP_M row tiles share a column tile's weights before the next is read."""
    per_group = GROUP_M * tiles_n
    group = program // per_group
    first = group * GROUP_M
    height = gl.minimum(tiles_m - first, GROUP_M)
    inner = program % per_group
    return first + inner % height, inner // height


@gluon.constexpr_function
def _parts(block_n, block_m, warps):
    """A tile's sums as [block_n · block_m / 4, 4], every thread's own as the tensor cores leave them: four
    values a thread, 512 bytes a warp, side by side in memory."""
    wide = block_m // 8
    across = warps.bit_length() - 1
    high = [[32 * wide << bit, 0] for bit in range((block_n // 16).bit_length() - 1)]
    inner = [[32 << bit, 0] for bit in range(wide.bit_length() - 1)]
    lanes = [[1 << bit, 0] for bit in range(5)]
    registers = [[0, 1], [0, 2], *inner, *high[across:]]
    return gl.DistributedLinearLayout(registers, lanes, high[:across], [], [block_n * block_m // 4, 4])


@gluon.jit
def sum_of_splits(
    acc,
    partial,
    arrivals,
    tile,
    split,
    splits,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """(sum over the splits of a tile, whether this program holds it). acc [BLOCK_N, BLOCK_M].

    Every program writes its part; the last to arrive adds all of them in the order of the splits, so the
    result does not depend on who was last. It leaves the counter at zero for the next launch.
    """
    PARTS: gl.constexpr = _parts(BLOCK_N, BLOCK_M, gl.num_warps())
    size: gl.constexpr = BLOCK_N * BLOCK_M
    part = acc.reshape([BLOCK_N // 16, 2, 8, BLOCK_M // 8, 4, 2]).permute([0, 3, 2, 4, 1, 5])
    part = gl.convert_layout(part.reshape([size // 4, 4]), PARTS)
    row = gl.arange(0, size // 4, gl.SliceLayout(1, PARTS)).expand_dims(1)
    offset = row * 4 + gl.arange(0, 4, gl.SliceLayout(0, PARTS)).expand_dims(0)
    base = partial + tile * (splits * size)
    gl.store(base + split * size + offset, part)
    barrier()
    last = gl.atomic_add(arrivals + tile, 1, sem="acq_rel") == splits - 1
    total = acc
    if last:
        sums = gl.load(base + offset, cache_modifier=".cg")
        if size <= 2048:
            # All loads at once: the wait for one of them is the wait for all.
            for other in gl.static_range(1, MAX_SPLITS):
                there = other < splits
                sums += gl.load(base + other * size + offset, mask=there, other=0.0, cache_modifier=".cg")
        else:
            for other in range(1, splits):
                sums += gl.load(base + other * size + offset, cache_modifier=".cg")
        tiled = sums.reshape([BLOCK_N // 16, BLOCK_M // 8, 8, 4, 2, 2]).permute([0, 4, 2, 1, 3, 5])
        total = gl.convert_layout(tiled.reshape([BLOCK_N, BLOCK_M]), LAYOUT)
        gl.store(arrivals + tile, 0)
    return total, last


@gluon.jit
def settled(value, nothing, LAYOUT: gl.constexpr):
    """value [BLOCK_N, BLOCK_M], just waited for, plus `nothing`: zeros int32 [BLOCK_N] in shared memory.

    The assembler moves conversions of a product's sums in front of the wait for them, where nothing else
    stands between. It cannot move them before a load that stands behind a barrier.
    """
    zero = nothing.load(gl.SliceLayout(1, LAYOUT)).to(value.dtype, bitcast=True)
    return value + zero.expand_dims(1)


@gluon.constexpr_function
def _lines(block_n, block_m, warps):
    """Layout for writing: a thread holds 8 neighbouring output features, 16 bytes of a row of the answer."""
    across = min(32, block_n // 8)
    return gl.BlockedLayout([8, 1], [across, 32 // across], [1, warps], [0, 1])


@gluon.jit
def write_tile(
    value,
    out,
    bias,
    residual,
    n0,
    m0,
    M,
    N,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    LAYOUT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Write value [BLOCK_N, BLOCK_M] to out [M, N], transposed, with bias and residual added in float32.

    Few rows are written as the tensor cores hold them; from 128 rows on they pass through shared memory.
    """
    OUT: gl.constexpr = LAYOUT if BLOCK_M < 128 else _lines(BLOCK_N, BLOCK_M, WARPS)
    if HAS_BIAS:
        n_here = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
        value += gl.load(bias + n_here, mask=n_here < N, other=0.0).to(gl.float32).expand_dims(1)
    n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT))
    m = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
    inside = (m < M).expand_dims(0) & (n < N).expand_dims(1)
    offset = m.to(gl.int64).expand_dims(0) * N + n.expand_dims(1)
    if HAS_RESIDUAL:
        value = gl.convert_layout(value, OUT)
        value += gl.load(residual + offset, mask=inside, other=0.0).to(gl.float32)
        gl.store(out + offset, value.to(out.dtype.element_ty), mask=inside)
    else:
        gl.store(out + offset, gl.convert_layout(value.to(out.dtype.element_ty), OUT), mask=inside)


__all__ = [
    "allowed_splits",
    "barrier",
    "gdc_wait",
    "line_descriptor",
    "programs",
    "rows_descriptor",
    "settled",
    "sum_of_splits",
    "tile_of",
    "tma_load",
    "workspace",
    "write_tile",
]
