"""Products of tiles, for many rows at once: 6 activation rows times a panel of 16 output features.

Sums stay in registers while the inner dimension passes by: 12 vectors of 8 sums, 2 of weights and one
activation in all lanes are what 16 AVX2 registers hold. A panel has its weights by position, 16
features side by side, so that a loaded vector serves 6 rows and nothing is added up across lanes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from delivery.kernels.cpu.ir import (
    F32,
    I16,
    I32,
    I64,
    Builder,
    Value,
    const,
    fma,
    load,
    multiply_add_pairs,
    splat,
    splat_const,
    store,
    vector,
)

ROWS, FEATURES = 6, 16
_LANES = 8
_PARTS = FEATURES // _LANES


def _offset(b: Builder, base: Value, index: Value, size: int, plus: int = 0) -> Value:
    return b.add(b.add(base, b.mul(index, const(size))), const(plus))


def _places(b: Builder, kind: ir.Type) -> list[list[Value]]:
    zero = splat_const(kind, 0.0 if kind == F32 else 0, _LANES)
    return [[cgutils.alloca_once_value(b, zero) for _ in range(_PARTS)] for _ in range(ROWS)]


def _write(
    b: Builder, sums: list[list[Value]], start: Value, start_stride: Value, out: Value, stride: Value
) -> None:
    """out = start + sums."""
    for m in range(ROWS):
        row, before = (b.add(at, b.mul(by, const(m))) for at, by in ((out, stride), (start, start_stride)))
        for p in range(_PARTS):
            place = const(4 * _LANES * p)
            value = load(b, b.add(before, place), vector(F32, _LANES))
            store(b, b.fadd(value, b.load(sums[m][p])), b.add(row, place))


@intrinsic
def int_tile(
    _t: Any,
    x: Any,
    x_scales: Any,
    panel: Any,
    scales: Any,
    groups: Any,
    pairs: Any,
    start: Any,
    out: Any,
    stride: Any,
) -> Any:
    """out[m][n] = start[n] + Σ_g x_scales[g][m] · scales[g][n] · Σ_{k in g} x[k][m] · panel[k][n].

    The inner sum is exact. x int16 [K / 2][6][2] and panel int16 [K / 2][16][2]: two positions side by
    side, `pairs` of them in a group. x_scales float32 [groups][6], scales float32 [groups][16], start
    float32 [16]; out float32 [6][≥ 16], its stride in bytes.
    """

    def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        x, x_scales, panel, scales, groups, pairs, start, out, stride = a
        sums, parts = _places(b, F32), _places(b, I32)
        with cgutils.for_range(b, groups, intp=I64) as group:
            for part in (part for row in parts for part in row):
                b.store(splat_const(I32, 0, _LANES), part)
            first = b.mul(group.index, pairs)
            with cgutils.for_range(b, pairs, intp=I64) as loop:
                pair = b.add(first, loop.index)
                weights = [
                    load(b, _offset(b, panel, pair, 4 * FEATURES, 4 * _LANES * p), vector(I16, 2 * _LANES))
                    for p in range(_PARTS)
                ]
                for m in range(ROWS):
                    both = splat(b, load(b, _offset(b, x, pair, 4 * ROWS, 4 * m), I32), _LANES)
                    both = b.bitcast(both, vector(I16, 2 * _LANES))
                    for p in range(_PARTS):
                        products = multiply_add_pairs(b, weights[p], both)
                        b.store(b.add(b.load(parts[m][p]), products), parts[m][p])
            for p in range(_PARTS):
                at = _offset(b, scales, group.index, 4 * FEATURES, 4 * _LANES * p)
                by = load(b, at, vector(F32, _LANES))
                for m in range(ROWS):
                    at = _offset(b, x_scales, group.index, 4 * ROWS, 4 * m)
                    row_by = splat(b, load(b, at, F32), _LANES)
                    whole = b.sitofp(b.load(parts[m][p]), vector(F32, _LANES))
                    b.store(fma(b, whole, b.fmul(by, row_by), b.load(sums[m][p])), sums[m][p])
        _write(b, sums, start, const(0), out, stride)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i, i, i, i, i, i), code


@intrinsic
def float_tile(
    _t: Any,
    x: Any,
    x_stride: Any,
    panel: Any,
    panel_stride: Any,
    count: Any,
    start: Any,
    start_stride: Any,
    out: Any,
    stride: Any,
) -> Any:
    """out[m][n] = start[m][n] + Σ_k x[m][k] · panel[k][n] of 6 rows, over `count` positions.

    All float32, strides in bytes; start may be out itself.
    """

    def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        x, x_stride, panel, panel_stride, count, start, start_stride, out, stride = a
        sums = _places(b, F32)
        rows = [b.add(x, b.mul(x_stride, const(m))) for m in range(ROWS)]
        with cgutils.for_range(b, count, intp=I64) as loop:
            at = b.add(panel, b.mul(loop.index, panel_stride))
            weights = [load(b, b.add(at, const(4 * _LANES * p)), vector(F32, _LANES)) for p in range(_PARTS)]
            for m in range(ROWS):
                value = splat(b, load(b, _offset(b, rows[m], loop.index, 4), F32), _LANES)
                for p in range(_PARTS):
                    b.store(fma(b, value, weights[p], b.load(sums[m][p])), sums[m][p])
        _write(b, sums, start, start_stride, out, stride)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i, i, i, i, i, i), code


def _transposed(b: Builder, rows: list[Value]) -> list[Value]:
    """The transpose of 8 vectors of 8 lanes of 32 bits."""

    def mixed(x: Value, y: Value, lanes: tuple[int, ...]) -> Value:
        return b.shuffle_vector(x, y, ir.Constant(vector(I32, _LANES), lanes))

    for step, low, high in (
        (1, (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)),
        (2, (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)),
        (4, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)),
    ):
        made = list(rows)
        for i in range(_LANES):
            if not i & step:
                made[i] = mixed(rows[i], rows[i | step], low)
                made[i | step] = mixed(rows[i], rows[i | step], high)
        rows = made
    return [rows[i] for i in (0, 2, 1, 3, 4, 6, 5, 7)]


@intrinsic
def transpose(_t: Any, rows: Any, stride: Any, blocks: Any, out: Any) -> Any:
    """out[k][0 … 7] = rows[0 … 7][k], values of 32 bits, k over 8 · blocks; out's rows are 64 bytes."""

    def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        rows, stride, blocks, out = a
        with cgutils.for_range(b, blocks, intp=I64) as loop:
            at = _offset(b, rows, loop.index, 4 * _LANES)
            found = [load(b, b.add(at, b.mul(stride, const(n))), vector(I32, _LANES)) for n in range(_LANES)]
            to = _offset(b, out, loop.index, 4 * FEATURES * _LANES)
            for k, row in enumerate(_transposed(b, found)):
                store(b, row, b.add(to, const(4 * FEATURES * k)))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i), code
