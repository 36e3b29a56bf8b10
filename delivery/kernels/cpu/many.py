"""Linear layers of many rows: weights are decoded once into panels, and panels meet tiles of 6 rows.

4-bit weights, and int8 weights with int8 activations, are multiplied as integers: on AVX2 one instruction
multiplies and adds two pairs of 16 bits per lane, twice as many as one of float32. Everything else is
computed in float32. A row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from delivery.kernels.cpu import linear as slot
from delivery.kernels.cpu.ir import (
    CHUNK,
    F32,
    I32,
    I64,
    KERNEL,
    LANES,
    Builder,
    Value,
    call_products,
    const,
    kernel,
    largest,
    load,
    nearest,
    read_f32,
    read_i64,
    smallest,
    splat,
    splat_const,
    vector,
    write_f32,
)
from delivery.kernels.cpu.quantize import MOST_INT, NO_QUANT, QUANT_INT8, at_least, peak, quantize_row
from delivery.kernels.cpu.tiles import FEATURES as FEATURES
from delivery.kernels.cpu.tiles import ROWS as ROWS
from delivery.kernels.cpu.tiles import float_tile, int_tile, transpose

MOST_GROUP = 4096
"""Integers: the largest group whose sums of products of 4 and 16 bits certainly fit into 32 bits."""
_ROWS_BYTES = 1 << 20
_LONGEST_SUM = 512
"""Floats: sums over more positions are made of partial ones, which rounding hurts less."""


def row_words(k: int, groups: int, ints: bool) -> int:
    """32-bit words of a decoded weight row, whole vectors: pairs of int16 and scales, or floats."""
    wide = -(-k // CHUNK) * CHUNK
    return -(-(wide // 2 + groups if ints else wide) // 8) * 8


def packed_bytes(rows: int, k: int, groups: int, ints: bool) -> int:
    """Room for `rows` rows as `pack` leaves them, scales behind the values."""
    blocks, wide = -(-rows // ROWS), -(-k // CHUNK) * CHUNK
    return blocks * ROWS * ((2 * wide + 4 * groups) if ints else 4 * wide)


def scratch_bytes(k: int, groups: int, ints: bool) -> int:
    """Scratch of one thread: 8 decoded rows, two panels, their biases and tiles."""
    words = row_words(k, groups, ints)
    return 4 * words * (8 + 2 * FEATURES) + 4 * FEATURES * (2 + 2 * ROWS)


def blocks_of(k: int, ints: bool) -> int:
    """Tiles of 6 rows that a panel meets before the next one: as many as stay in a shared cache."""
    return max(8, _ROWS_BYTES // (ROWS * k * (2 if ints else 4)))


def pieces(n: int, glu: bool) -> int:
    """Panels."""
    return -(-(n // 2 if glu else n) // FEATURES)


@intrinsic
def _scatter_ints(_t: Any, x: Any, inverse: Any, limit: Any, chunks: Any, out: Any) -> Any:
    """One row as int16 = round(x · inverse) within ± limit: a chunk's pairs (i, i + 16), every sixth word."""

    def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        x, inverse, limit, chunks, out = a
        by, high = splat(b, inverse), splat(b, limit)
        low = b.fneg(high)
        with cgutils.for_range(b, chunks, intp=I64) as loop:
            at = b.add(x, b.mul(loop.index, const(4 * CHUNK)))
            halves = []
            for i in range(2):
                values = load(b, b.add(at, const(4 * LANES * i)), vector(F32))
                values = smallest(b, largest(b, nearest(b, b.fmul(values, by)), low), high)
                halves.append(b.fptosi(values, vector(I32)))
            even = b.and_(halves[0], splat_const(I32, 0xFFFF))
            both = b.or_(even, b.shl(halves[1], splat_const(I32, 16)))
            to = b.add(out, b.mul(loop.index, const(4 * ROWS * LANES)))
            for i in range(LANES):
                word = b.extract_element(both, ir.Constant(I32, i))
                b.store(word, b.inttoptr(b.add(to, const(4 * ROWS * i)), I32.as_pointer())).align = 1
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, types.float32, types.float32, i, i), code


@kernel(KERNEL)
def pack(op: int, thread: int, block: int) -> None:
    """Six rows as tiles read them: reordered, then as int16 with scales by group, or rounded to a dtype."""
    x, stride, rows, k = (
        read_i64(op + 8 * slot.X),
        read_i64(op + 8 * slot.X_STRIDE),
        read_i64(op + 8 * slot.M),
        read_i64(op + 8 * slot.K),
    )
    order, quant, fixed = (
        read_i64(op + 8 * slot.ORDER),
        read_i64(op + 8 * slot.QUANT),
        read_i64(op + 8 * slot.INPUT_SCALE),
    )
    wide = (k + CHUNK - 1) // CHUNK * CHUNK
    packed, blocks = read_i64(op + 8 * slot.PACKED), (rows + ROWS - 1) // ROWS
    groups, ints = read_i64(op + 8 * slot.GROUPS), read_i64(op + 8 * slot.INTS) != 0
    group = read_i64(op + 8 * slot.GROUP_CHUNKS) * CHUNK
    if group == 0:
        group = wide
    ordered = read_i64(op + 8 * slot.SCRATCH) + thread * read_i64(op + 8 * slot.SCRATCH_BYTES)
    scales = packed + 2 * ROWS * blocks * wide + 4 * ROWS * block * groups
    for m in range(ROWS):
        at = ROWS * block + m
        if at >= rows:
            if ints:
                for g in range(groups):
                    write_f32(scales + 4 * (ROWS * g + m), np.float32(0.0))
            continue
        row = x + at * stride
        if order != 0:
            for i in range(k):
                write_f32(ordered + 4 * i, read_f32(row + 4 * read_i64(order + 8 * i)))
            for i in range(k, wide):
                write_f32(ordered + 4 * i, np.float32(0.0))
            row = ordered
        if not ints:
            to = packed + 4 * at * wide
            if quant == NO_QUANT:
                for i in range(wide):
                    write_f32(to + 4 * i, read_f32(row + 4 * i))
            else:
                scale = quantize_row(row, wide, quant, fixed, to)
                for i in range(wide):
                    write_f32(to + 4 * i, read_f32(to + 4 * i) * scale)
            continue
        limit = np.float32(127.0) if quant == QUANT_INT8 else np.float32(MOST_INT)
        least = np.float32(1e-12) if quant == QUANT_INT8 else np.float32(MOST_INT * 1e-30)
        to = packed + 2 * ROWS * block * wide + 4 * m
        for g in range(groups):
            first, count = 4 * g * group, min(group, wide - g * group)
            scale = read_f32(fixed) if fixed != 0 else at_least(least, peak(row + first, count)) / limit
            write_f32(scales + 4 * (ROWS * g + m), scale)
            inverse = np.float32(1.0) / scale
            _scatter_ints(row + first, inverse, limit, count // CHUNK, to + ROWS * g * group * 2)


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def _panel(op: int, thread: int, n0: int, n1: int, decoded: int, words: int, panel: int) -> None:
    """Weight rows n0 … n1 − 1, at most 16, beside each other; zeros where there are fewer."""
    for half in range(2):
        first = n0 + 8 * half
        count = max(0, min(8, n1 - first))
        if count > 0:
            call_products(
                read_i64(op + 8 * slot.PRODUCTS), op, thread, first, first + count, decoded, 4 * words
            )
        for i in range(count * words, 8 * words):
            write_f32(decoded + 4 * i, np.float32(0.0))
        transpose(decoded, 4 * words, words // 8, panel + 32 * half)


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def _tile(op: int, block: int, panel: int, start: int, out: int, stride: int) -> None:
    """Six rows times a panel."""
    k, packed = read_i64(op + 8 * slot.K), read_i64(op + 8 * slot.PACKED)
    wide = (k + CHUNK - 1) // CHUNK * CHUNK
    if read_i64(op + 8 * slot.INTS) != 0:
        groups = read_i64(op + 8 * slot.GROUPS)
        blocks = (read_i64(op + 8 * slot.M) + ROWS - 1) // ROWS
        x = packed + 2 * ROWS * block * wide
        x_scales = packed + 2 * ROWS * blocks * wide + 4 * ROWS * block * groups
        scales = panel + 2 * FEATURES * wide
        int_tile(x, x_scales, panel, scales, groups, wide // 2 // groups, start, out, stride)
        return
    x, x_stride = packed, 4 * wide
    if packed == 0:
        x, x_stride = read_i64(op + 8 * slot.X), read_i64(op + 8 * slot.X_STRIDE)
    x += ROWS * block * x_stride
    start_stride = 0
    for first in range(0, k, _LONGEST_SUM):
        count, at = min(_LONGEST_SUM, k - first), panel + 4 * FEATURES * first
        float_tile(x + 4 * first, x_stride, at, 4 * FEATURES, count, start, start_stride, out, stride)
        start, start_stride = out, stride


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def _start(op: int, n0: int, n1: int, start: int) -> None:
    bias = read_i64(op + 8 * slot.BIAS)
    for i in range(FEATURES):
        inside = bias != 0 and n0 + i < n1
        write_f32(start + 4 * i, read_f32(bias + 4 * (n0 + i)) if inside else np.float32(0.0))


@kernel(KERNEL)
def run(op: int, thread: int, piece: int) -> None:
    """One panel of features, with GLU of gate and of up, times some tiles of rows.

    Writes whole tiles: out has rows to the next multiple of 6 and columns to the next multiple of 16.
    """
    n, glu = read_i64(op + 8 * slot.N), read_i64(op + 8 * slot.GLU)
    groups, ints = read_i64(op + 8 * slot.GROUPS), read_i64(op + 8 * slot.INTS) != 0
    wide = (read_i64(op + 8 * slot.K) + CHUNK - 1) // CHUNK * CHUNK
    words = ((wide // 2 + groups if ints else wide) + 7) // 8 * 8
    width = n // 2 if glu != slot.NO_GLU else n
    panels = (width + FEATURES - 1) // FEATURES
    n0 = piece % panels * FEATURES
    n1 = min(width, n0 + FEATURES)
    first = piece // panels * read_i64(op + 8 * slot.BLOCKS)
    last = min(first + read_i64(op + 8 * slot.BLOCKS), (read_i64(op + 8 * slot.M) + ROWS - 1) // ROWS)
    out, stride = read_i64(op + 8 * slot.OUT) + 4 * n0, read_i64(op + 8 * slot.OUT_STRIDE)
    decoded = read_i64(op + 8 * slot.SCRATCH) + thread * read_i64(op + 8 * slot.SCRATCH_BYTES)
    panel = decoded + 4 * 8 * words
    _panel(op, thread, n0, n1, decoded, words, panel)
    if glu == slot.NO_GLU:
        start = panel + 4 * FEATURES * words
        _start(op, n0, n1, start)
        for block in range(first, last):
            _tile(op, block, panel, start, out + ROWS * block * stride, stride)
        return
    up_panel = panel + 4 * FEATURES * words
    _panel(op, thread, width + n0, width + n1, decoded, words, up_panel)
    start = up_panel + 4 * FEATURES * words
    up_start = start + 4 * FEATURES
    gate, up = start + 8 * FEATURES, start + (8 + 4 * ROWS) * FEATURES
    _start(op, n0, n1, start)
    _start(op, width + n0, width + n1, up_start)
    for block in range(first, last):
        _tile(op, block, panel, start, gate, 4 * FEATURES)
        _tile(op, block, up_panel, up_start, up, 4 * FEATURES)
        for m in range(ROWS):
            row = 4 * FEATURES * m
            slot.activate_row(glu, gate + row, up + row, out + (ROWS * block + m) * stride, FEATURES)
