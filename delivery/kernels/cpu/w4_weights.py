"""Linear layers of a CPU program over 4-bit weights in groups.

Activations are met as int16 with one scale per row and group (15 bits, finer than the 16-bit floats that
the scheme is named for): a product of integers takes two weights at once, and decoding ends at 16 bits.
A row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from numba import njit

from delivery.kernels.cpu import linear as slot
from delivery.kernels.cpu.ir import (
    CHUNK,
    PRODUCTS_KERNEL,
    kernel,
    read_f16,
    read_f32,
    read_i64,
    write_f32,
)
from delivery.kernels.cpu.linear import finish, scales_of
from delivery.kernels.cpu.w4_dot import w4_dots, w4_pairs, w4_wideners

KINDS = ("w4_half", "w4_float")

_HALF_1, _FLOAT_1 = w4_dots[1, True], w4_dots[1, False]
_HALF_2, _FLOAT_2 = w4_dots[2, True], w4_dots[2, False]
_HALF_4, _FLOAT_4 = w4_dots[4, True], w4_dots[4, False]
_HALF_WIDEN, _FLOAT_WIDEN = w4_wideners[True], w4_wideners[False]


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def _row(op: int, n: int) -> tuple[int, int, int]:
    """Addresses of a weight row, its scales and its zero points."""
    return (
        read_i64(op + 8 * slot.WEIGHT) + n * read_i64(op + 8 * slot.ROW_BYTES),
        read_i64(op + 8 * slot.SCALE) + n * read_i64(op + 8 * slot.SCALE_BYTES),
        read_i64(op + 8 * slot.ZERO) + n * read_i64(op + 8 * slot.ZERO_BYTES),
    )


@kernel(PRODUCTS_KERNEL)
def products(op: int, thread: int, n0: int, n1: int, out: int, out_stride: int) -> None:
    """Weight rows n0 … n1 − 1 times all activation rows, into out[m][n − n0]."""
    rows, half = read_i64(op + 8 * slot.M), read_i64(op + 8 * slot.KIND) == 0
    groups, size = read_i64(op + 8 * slot.GROUPS), read_i64(op + 8 * slot.GROUP_CHUNKS)
    x_scales = scales_of(op, thread)
    stride = (read_i64(op + 8 * slot.K) + CHUNK - 1) // CHUNK * CHUNK * 4
    ints = x_scales - rows * stride
    together = 4 if rows >= 4 else min(rows, 2)
    for block in range((rows + together - 1) // together):
        # Where fewer are left, the last ones again.
        m = min(together * block, rows - together)
        x, by = ints + m * stride, x_scales + 4 * m * groups
        for n in range(n0, n1):
            row, scales, zeros = _row(op, n)
            at = out + m * out_stride + 4 * (n - n0)
            if together == 4:
                if half:
                    _HALF_4(row, scales, zeros, groups, size, x, stride, by, at, out_stride)
                else:
                    _FLOAT_4(row, scales, zeros, groups, size, x, stride, by, at, out_stride)
            elif together == 2:
                if half:
                    _HALF_2(row, scales, zeros, groups, size, x, stride, by, at, out_stride)
                else:
                    _FLOAT_2(row, scales, zeros, groups, size, x, stride, by, at, out_stride)
            elif half:
                _HALF_1(row, scales, zeros, groups, size, x, stride, by, at, out_stride)
            else:
                _FLOAT_1(row, scales, zeros, groups, size, x, stride, by, at, out_stride)
    finish(op, thread, n0, n1, out, out_stride, 0)


@kernel(PRODUCTS_KERNEL)
def rows(op: int, _thread: int, n0: int, n1: int, out: int, out_stride: int) -> None:
    """Weight rows n0 … n1 − 1, decoded: pairs of int16 and behind them the groups' scales, or float32."""
    half, ints = read_i64(op + 8 * slot.KIND) == 0, read_i64(op + 8 * slot.INTS) != 0
    groups, size = read_i64(op + 8 * slot.GROUPS), read_i64(op + 8 * slot.GROUP_CHUNKS)
    for n in range(n0, n1):
        row, scales, zeros = _row(op, n)
        to = out + (n - n0) * out_stride
        if ints:
            w4_pairs(row, zeros, groups, size, to)
            to += groups * size * 2 * CHUNK
            for g in range(groups):
                write_f32(to + 4 * g, read_f16(scales + 2 * g) if half else read_f32(scales + 4 * g))
        elif half:
            _HALF_WIDEN(row, scales, zeros, groups, size, to)
        else:
            _FLOAT_WIDEN(row, scales, zeros, groups, size, to)
