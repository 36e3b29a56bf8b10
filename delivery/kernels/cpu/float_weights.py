"""Linear layers of a CPU program over float32, bfloat16 and float16 weights."""

from __future__ import annotations

import numpy as np
from numba import njit

from delivery.kernels.cpu import linear as slot
from delivery.kernels.cpu.dot import float_dots
from delivery.kernels.cpu.ir import CHUNK, LANES, PRODUCTS_KERNEL, kernel, read_i64
from delivery.kernels.cpu.linear import finish, input_rows
from delivery.kernels.cpu.rows import widen

KINDS = ("float32", "bfloat16", "float16")

_F32_1, _F32_4 = float_dots["float32", 1], float_dots["float32", 4]
_BF16_1, _BF16_4 = float_dots["bfloat16", 1], float_dots["bfloat16", 4]
_F16_1, _F16_4 = float_dots["float16", 1], float_dots["float16", 4]


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def _dot(
    kind: int, many: bool, row: int, x: int, stride: int, chunks: int, out: int, out_stride: int
) -> None:
    """One weight row times one or four activation rows."""
    one = np.float32(1.0)
    if kind == 0:
        if many:
            _F32_4(row, one, x, stride, chunks, out, out_stride)
        else:
            _F32_1(row, one, x, stride, chunks, out, out_stride)
    elif kind == 1:
        if many:
            _BF16_4(row, one, x, stride, chunks, out, out_stride)
        else:
            _BF16_1(row, one, x, stride, chunks, out, out_stride)
    elif many:
        _F16_4(row, one, x, stride, chunks, out, out_stride)
    else:
        _F16_1(row, one, x, stride, chunks, out, out_stride)


@kernel(PRODUCTS_KERNEL)
def products(op: int, thread: int, n0: int, n1: int, out: int, out_stride: int) -> None:
    """Weight rows n0 … n1 − 1 times all activation rows, into out[m][n − n0]."""
    rows, kind = read_i64(op + 8 * slot.M), read_i64(op + 8 * slot.KIND)
    chunks = (read_i64(op + 8 * slot.K) + CHUNK - 1) // CHUNK
    weight, row_bytes = read_i64(op + 8 * slot.WEIGHT), read_i64(op + 8 * slot.ROW_BYTES)
    x, stride = input_rows(op, thread)
    m = 0
    while m < rows:
        many = rows - m >= 4
        for n in range(n0, n1):
            at = out + m * out_stride + 4 * (n - n0)
            _dot(kind, many, weight + n * row_bytes, x + m * stride, stride, chunks, at, out_stride)
        m += 4 if many else 1
    finish(op, thread, n0, n1, out, out_stride, 0)


@kernel(PRODUCTS_KERNEL)
def rows(op: int, _thread: int, n0: int, n1: int, out: int, out_stride: int) -> None:
    """Weight rows n0 … n1 − 1 as float32."""
    kind = read_i64(op + 8 * slot.KIND)
    vectors = (read_i64(op + 8 * slot.K) + CHUNK - 1) // CHUNK * (CHUNK // LANES)
    for n in range(n0, n1):
        row = read_i64(op + 8 * slot.WEIGHT) + n * read_i64(op + 8 * slot.ROW_BYTES)
        widen(kind, row, np.float32(1.0), out + (n - n0) * out_stride, vectors)
