"""Linear layers of a CPU program over int8 and float8 weights with one scale per output feature.

int8 activations meet int8 weights as integers, and sums are exact; all else is computed in float32.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from delivery.kernels.cpu import linear as slot
from delivery.kernels.cpu.dot import float_dots, int8_dots, int8_pairs
from delivery.kernels.cpu.ir import (
    CHUNK,
    DECODE,
    LANES,
    PRODUCTS_KERNEL,
    kernel,
    read_f32,
    read_i64,
    write_f32,
)
from delivery.kernels.cpu.linear import finish, input_rows
from delivery.kernels.cpu.quantize import QUANT_INT8
from delivery.kernels.cpu.rows import widener

KINDS = ("int8", "float8_e5m2", "float8_e4m3fn")

_I8_1, _I8_4 = float_dots["int8", 1], float_dots["int8", 4]
_E5_1, _E5_4 = float_dots["float8_e5m2", 1], float_dots["float8_e5m2", 4]
_E4_1, _E4_4 = float_dots["float8_e4m3fn", 1], float_dots["float8_e4m3fn", 4]
_INT_1, _INT_4 = int8_dots[1], int8_dots[4]
_WIDEN_I8, _WIDEN_E5, _WIDEN_E4 = (widener(DECODE[name]) for name in KINDS)
_INT8 = 0


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def _dot(
    kind: int,
    many: bool,
    row: int,
    by: np.float32,
    x: int,
    stride: int,
    chunks: int,
    out: int,
    out_stride: int,
) -> None:
    """One weight row times one or four float activation rows."""
    if kind == _INT8:
        if many:
            _I8_4(row, by, x, stride, chunks, out, out_stride)
        else:
            _I8_1(row, by, x, stride, chunks, out, out_stride)
    elif kind == 1:
        if many:
            _E5_4(row, by, x, stride, chunks, out, out_stride)
        else:
            _E5_1(row, by, x, stride, chunks, out, out_stride)
    elif many:
        _E4_4(row, by, x, stride, chunks, out, out_stride)
    else:
        _E4_1(row, by, x, stride, chunks, out, out_stride)


@kernel(PRODUCTS_KERNEL)
def products(op: int, thread: int, n0: int, n1: int, out: int, out_stride: int) -> None:
    """Weight rows n0 … n1 − 1 times all activation rows, into out[m][n − n0]."""
    rows, kind = read_i64(op + 8 * slot.M), read_i64(op + 8 * slot.KIND)
    chunks = (read_i64(op + 8 * slot.K) + CHUNK - 1) // CHUNK
    weight, row_bytes = read_i64(op + 8 * slot.WEIGHT), read_i64(op + 8 * slot.ROW_BYTES)
    scales = read_i64(op + 8 * slot.SCALE)
    x, stride = input_rows(op, thread)
    integers = kind == _INT8 and read_i64(op + 8 * slot.QUANT) == QUANT_INT8
    m = 0
    while m < rows:
        many = rows - m >= 4
        for n in range(n0, n1):
            row, at = weight + n * row_bytes, out + m * out_stride + 4 * (n - n0)
            if not integers:
                by = read_f32(scales + 4 * n)
                _dot(kind, many, row, by, x + m * stride, stride, chunks, at, out_stride)
            elif many:
                _INT_4(row, x + m * stride, stride, chunks, at, out_stride)
            else:
                _INT_1(row, x + m * stride, stride, chunks, at, out_stride)
        m += 4 if many else 1
    finish(op, thread, n0, n1, out, out_stride, scales if integers else 0)


@kernel(PRODUCTS_KERNEL)
def rows(op: int, _thread: int, n0: int, n1: int, out: int, out_stride: int) -> None:
    """Weight rows n0 … n1 − 1, decoded: pairs of int16 and behind them their scale, or float32."""
    kind, ints = read_i64(op + 8 * slot.KIND), read_i64(op + 8 * slot.INTS) != 0
    chunks = (read_i64(op + 8 * slot.K) + CHUNK - 1) // CHUNK
    vectors = chunks * (CHUNK // LANES)
    for n in range(n0, n1):
        row = read_i64(op + 8 * slot.WEIGHT) + n * read_i64(op + 8 * slot.ROW_BYTES)
        by, to = read_f32(read_i64(op + 8 * slot.SCALE) + 4 * n), out + (n - n0) * out_stride
        if ints:
            int8_pairs(row, chunks, to)
            write_f32(to + chunks * 2 * CHUNK, by)
        elif kind == _INT8:
            _WIDEN_I8(row, by, to, vectors)
        elif kind == 1:
            _WIDEN_E5(row, by, to, vectors)
        else:
            _WIDEN_E4(row, by, to, vectors)
