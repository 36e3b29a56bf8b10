"""Inner products of one stored weight row with a few activation rows, as LLVM intrinsics.

Each multiplies a row of whole 32-weight chunks and writes its results; `rows` is 1 or 4, so that a row that
was decoded serves four requests. x rows are float32 (or int16) and padded with zeros to whole chunks. For
4 bits: `w4_dot`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from delivery.kernels.cpu.ir import (
    CHUNK,
    DECODE,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Builder,
    Value,
    const,
    fma,
    load,
    multiply_add_pairs,
    splat_const,
    store,
    total,
    total_i32,
    vector,
)

ROWS = (1, 4)


def accumulators(b: Builder, count: int, value: ir.Constant) -> list[Value]:
    return [cgutils.alloca_once_value(b, value) for _ in range(count)]


def _x(b: Builder, x: Value, stride: Value, row: int, k: Value) -> Value:
    """16 activations of a row from position k; stride in bytes."""
    return load(b, b.add(b.add(x, b.mul(stride, const(row))), b.mul(k, const(4))), vector(F32))


def write_totals(b: Builder, sums: list[Value], scale: Value, out: Value, stride: Value) -> None:
    for row, value in enumerate(sums):
        store(b, b.fmul(total(b, value), scale), b.add(out, b.mul(stride, const(row))))


def _float_dot(decode: str, rows: int) -> Any:
    @intrinsic
    def dot(
        _t: Any, row: Any, scale: Any, x: Any, x_stride: Any, chunks: Any, out: Any, out_stride: Any
    ) -> Any:
        """out[m] = scale · Σ_k row[k] · x[m][k]; addresses and strides in bytes, scale float32."""

        def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
            row, scale, x, x_stride, chunks, out, out_stride = a
            # One row alone has two chains of additions per half, so that they overlap.
            parts = 2 if rows == 1 else 1
            sums = accumulators(b, rows * parts, splat_const(F32, 0.0))
            with cgutils.for_range(b, chunks, intp=I64) as loop:
                for half in range(CHUNK // LANES):
                    k = b.add(b.mul(loop.index, const(CHUNK)), const(LANES * half))
                    weights = DECODE[decode](b, row, k)
                    for m in range(rows):
                        place = sums[m * parts + half % parts]
                        b.store(fma(b, weights, _x(b, x, x_stride, m, k), b.load(place)), place)
            joined = [b.load(s) for s in sums]
            if parts == 2:
                joined = [b.fadd(joined[0], joined[1])]
            write_totals(b, joined, scale, out, out_stride)
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, types.float32, i, i, i, i, i), code

    return dot


float_dots = {(name, rows): _float_dot(name, rows) for name in DECODE for rows in ROWS}


@intrinsic
def int8_pairs(_t: Any, row: Any, chunks: Any, out: Any) -> Any:
    """out int16 [K / 2][2] of an int8 row, in the order of `w4_pairs`."""

    def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        with cgutils.for_range(b, a[1], intp=I64) as loop:
            at = b.add(a[0], b.mul(loop.index, const(CHUNK)))
            low, high = (b.sext(load(b, b.add(at, const(i)), vector(I8)), vector(I16)) for i in (0, LANES))
            lanes = [lane for i in range(LANES) for lane in (i, i + LANES)]
            both = b.shuffle_vector(low, high, ir.Constant(vector(I32, 2 * LANES), lanes))
            store(b, both, b.add(a[2], b.mul(loop.index, const(2 * CHUNK))))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i), code


def _int8_dot(rows: int) -> Any:
    @intrinsic
    def dot(_t: Any, row: Any, x: Any, x_stride: Any, chunks: Any, out: Any, out_stride: Any) -> Any:
        """out[m] = float(Σ_k row[k] · x[m][k]) of int8 weights and int8-valued int16 x; exact."""

        def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
            row, x, x_stride, chunks, out, out_stride = a
            sums = accumulators(b, rows, splat_const(I32, 0, 8))
            with cgutils.for_range(b, chunks, intp=I64) as loop:
                for half in range(CHUNK // LANES):
                    k = b.add(b.mul(loop.index, const(CHUNK)), const(LANES * half))
                    weights = b.sext(load(b, b.add(row, k), vector(I8)), vector(I16))
                    for m in range(rows):
                        at = b.add(b.add(x, b.mul(x_stride, const(m))), b.mul(k, const(2)))
                        pairs = multiply_add_pairs(b, weights, load(b, at, vector(I16)))
                        b.store(b.add(b.load(sums[m]), pairs), sums[m])
            for m in range(rows):
                value = b.sitofp(total_i32(b, b.load(sums[m])), F32)
                store(b, value, b.add(out, b.mul(out_stride, const(m))))
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, i, i, i, i, i), code

    return dot


int8_dots = {rows: _int8_dot(rows) for rows in ROWS}
