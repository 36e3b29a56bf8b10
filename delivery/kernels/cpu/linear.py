"""Linear layers of a CPU program: what is common to all stored formats.

Weights stay in their stored format and are decoded in registers (`float_weights`, `byte_weights`,
`w4_weights`). Four activation rows share each decoded weight row; a piece of weight rows is small enough
to stay in the cache meanwhile.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from delivery.kernels.cpu.ir import (
    CHUNK,
    F32,
    I64,
    KERNEL,
    LANES,
    Builder,
    Value,
    call_products,
    const,
    exp,
    kernel,
    load,
    read_f32,
    read_i64,
    smallest,
    splat_const,
    store,
    vector,
    write_f32,
)
from delivery.kernels.cpu.quantize import NO_QUANT, quantize_bytes, quantize_row, quantize_words

NO_GLU, SILU, GELU_TANH, GELU = range(4)

# Arguments, as indices into the operation's int64 slots; the first three belong to the program.
(
    PRODUCTS,
    KIND,
    X,
    X_STRIDE,
    M,
    K,
    N,
    WEIGHT,
    ROW_BYTES,
    SCALE,
    SCALE_BYTES,
    ZERO,
    ZERO_BYTES,
    GROUPS,
    GROUP_CHUNKS,
    BIAS,
    OUT,
    OUT_STRIDE,
    QUANT,
    INPUT_SCALE,
    GLU,
    GRAIN,
    ORDER,
    SCRATCH,
    SCRATCH_BYTES,
    PACKED,
    INTS,
    BLOCKS,
) = range(3, 31)
# PRODUCTS: address of the format's function: `products`, or `rows` for many rows (`many`), which alone reads
# the last three. PACKED: rows as `many.pack` leaves them; 0 where they are read as they are. INTS: whether
# they and the weights are integers. BLOCKS: tiles of rows in a piece.


@intrinsic
def _silu_mul(_t: Any, gate: Any, up: Any, out: Any, vectors: Any) -> Any:
    """out = gate / (1 + e^−gate) · up over vectors · 16 floats."""

    def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        with cgutils.for_range(b, a[3], intp=I64) as loop:
            at = b.mul(loop.index, const(4 * LANES))
            gate, up = (load(b, b.add(a[i], at), vector(F32)) for i in (0, 1))
            one = splat_const(F32, 1.0)
            # e^88 is as good as any larger number, which `exp` does not know: gates of -100 and less exist.
            below = b.fadd(one, exp(b, smallest(b, b.fneg(gate), splat_const(F32, 88.0))))
            store(b, b.fmul(b.fdiv(gate, below), up), b.add(a[2], at))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i), code


@kernel(KERNEL)
def prepare(op: int, thread: int, _piece: int) -> None:
    """What every thread does for itself before it claims rows: reorder and quantise x in its scratch.

    Scratch of a thread: prepared rows, twice; scales (of rows or groups); room for gate and up.
    """
    x, stride, rows, k = (
        read_i64(op + 8 * X),
        read_i64(op + 8 * X_STRIDE),
        read_i64(op + 8 * M),
        read_i64(op + 8 * K),
    )
    order, quant = read_i64(op + 8 * ORDER), read_i64(op + 8 * QUANT)
    scratch = read_i64(op + 8 * SCRATCH) + thread * read_i64(op + 8 * SCRATCH_BYTES)
    padded = (k + CHUNK - 1) // CHUNK * CHUNK
    scales = scratch + 2 * rows * padded * 4
    if order != 0:
        for m in range(rows):
            row = scratch + m * padded * 4
            for at in range(k):
                write_f32(row + 4 * at, read_f32(x + m * stride + 4 * read_i64(order + 8 * at)))
            for at in range(k, padded):
                write_f32(row + 4 * at, np.float32(0.0))
        x, stride = scratch, padded * 4
    if quant != NO_QUANT:
        for m in range(rows):
            row = scratch + m * padded * 4
            scale = quantize_row(x + m * stride, padded, quant, read_i64(op + 8 * INPUT_SCALE), row)
            write_f32(scales + 4 * m, scale)
    elif read_i64(op + 8 * ZERO) != 0:
        group = read_i64(op + 8 * GROUP_CHUNKS) * CHUNK
        groups = read_i64(op + 8 * GROUPS)
        for m in range(rows):
            row = scratch + (rows + m) * padded * 4
            to = scales + 4 * m * groups
            if rows == 1:
                quantize_bytes(x, padded, group, row, to)
            else:
                quantize_words(x + m * stride, padded, group, row, to)


def scratch_bytes(rows: int, k: int, groups: int, grain: int) -> int:
    """Scratch that one thread needs for an operation."""
    padded = -(-k // CHUNK) * CHUNK
    return (2 * rows * padded + rows * (groups + 1) + 2 * rows * (grain + LANES)) * 4 + 256


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def input_rows(op: int, thread: int) -> tuple[int, int]:
    """Address and stride of the activation rows that products read."""
    if read_i64(op + 8 * ORDER) == 0 and read_i64(op + 8 * QUANT) == NO_QUANT:
        return read_i64(op + 8 * X), read_i64(op + 8 * X_STRIDE)
    scratch = read_i64(op + 8 * SCRATCH) + thread * read_i64(op + 8 * SCRATCH_BYTES)
    return scratch, (read_i64(op + 8 * K) + CHUNK - 1) // CHUNK * CHUNK * 4


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def scales_of(op: int, thread: int) -> int:
    """Address of the scales that `prepare` wrote."""
    scratch = read_i64(op + 8 * SCRATCH) + thread * read_i64(op + 8 * SCRATCH_BYTES)
    padded = (read_i64(op + 8 * K) + CHUNK - 1) // CHUNK * CHUNK
    return scratch + 2 * read_i64(op + 8 * M) * padded * 4


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def finish(op: int, thread: int, n0: int, n1: int, out: int, stride: int, weight_scales: int) -> None:
    """Scales of rows and (weight_scales, or 0) of features, and the bias, applied to out[m][n − n0]."""
    bias, quant = read_i64(op + 8 * BIAS), read_i64(op + 8 * QUANT)
    if bias == 0 and quant == NO_QUANT:
        return
    scales = scales_of(op, thread)
    for m in range(read_i64(op + 8 * M)):
        by = read_f32(scales + 4 * m) if quant != NO_QUANT else np.float32(1.0)
        for n in range(n0, n1):
            at = out + m * stride + 4 * (n - n0)
            value = read_f32(at) * by
            if weight_scales != 0:
                value *= read_f32(weight_scales + 4 * n)
            if bias != 0:
                value += read_f32(bias + 4 * n)
            write_f32(at, value)


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def activate_row(mode: int, gate: int, up: int, out: int, count: int) -> None:
    first = 0
    if mode == SILU:
        _silu_mul(gate, up, out, count // LANES)
        first = count // LANES * LANES
    for i in range(first, count):
        g = read_f32(gate + 4 * i)
        if mode == SILU:
            g = g / np.float32(1.0 + math.exp(-g))
        elif mode == GELU_TANH:
            inner = np.float32(0.7978845608028654) * (g + np.float32(0.044715) * g * g * g)
            g = np.float32(0.5) * g * (np.float32(1.0) + np.float32(math.tanh(inner)))
        else:
            g = np.float32(0.5) * g * np.float32(1.0 + math.erf(g * 0.7071067811865476))
        write_f32(out + 4 * i, g * read_f32(up + 4 * i))


@kernel(KERNEL)
def run(op: int, thread: int, piece: int) -> None:
    """One claimed piece: `grain` output features. With GLU: of gate, and the same ones of up."""
    grain, n, rows = read_i64(op + 8 * GRAIN), read_i64(op + 8 * N), read_i64(op + 8 * M)
    glu, out, stride = read_i64(op + 8 * GLU), read_i64(op + 8 * OUT), read_i64(op + 8 * OUT_STRIDE)
    products = read_i64(op + 8 * PRODUCTS)
    n0 = piece * grain
    if glu == NO_GLU:
        call_products(products, op, thread, n0, min(n, n0 + grain), out + 4 * n0, stride)
        return
    half = n // 2
    n1 = min(half, n0 + grain)
    gate = scales_of(op, thread) + 4 * rows * (read_i64(op + 8 * GROUPS) + 1)
    wide = (grain + LANES) * 4
    up = gate + rows * wide
    call_products(products, op, thread, n0, n1, gate, wide)
    call_products(products, op, thread, half + n0, half + n1, up, wide)
    for m in range(rows):
        activate_row(glu, gate + m * wide, up + m * wide, out + m * stride + 4 * n0, n1 - n0)


@kernel(KERNEL)
def activate(op: int, _thread: int, m: int) -> None:
    """One row of act(gate) · up; gate and up [.., N / 2] are the halves of X."""
    half = read_i64(op + 8 * N) // 2
    row = read_i64(op + 8 * X) + m * read_i64(op + 8 * X_STRIDE)
    out = read_i64(op + 8 * OUT) + m * read_i64(op + 8 * OUT_STRIDE)
    activate_row(read_i64(op + 8 * GLU), row, row + 4 * half, out, half)


def pieces(n: int, grain: int, glu: int) -> int:
    """How many pieces there are to claim."""
    return -(-(n // 2 if glu != NO_GLU else n) // grain)
