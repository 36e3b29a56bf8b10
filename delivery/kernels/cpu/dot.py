"""Inner products of one stored weight row with a few activation rows, as LLVM intrinsics.

Each multiplies a row of whole 32-weight chunks and writes its results; `rows` is 1 or 4 (2 as well for
4-bit weights), so that a row that was decoded serves four requests. x rows are float32 (or int16) and
padded with zeros to whole chunks.
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
    F16,
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
    splat,
    splat_const,
    store,
    total,
    total_i32,
    vector,
)

ROWS = (1, 4)
W4_ROWS = (1, 2, 4)


def _accumulators(b: Builder, count: int, value: ir.Constant) -> list[Value]:
    return [cgutils.alloca_once_value(b, value) for _ in range(count)]


def _x(b: Builder, x: Value, stride: Value, row: int, k: Value) -> Value:
    """16 activations of a row from position k; stride in bytes."""
    return load(b, b.add(b.add(x, b.mul(stride, const(row))), b.mul(k, const(4))), vector(F32))


def _finish(b: Builder, sums: list[Value], scale: Value, out: Value, stride: Value) -> None:
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
            sums = _accumulators(b, rows * parts, splat_const(F32, 0.0))
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
            _finish(b, joined, scale, out, out_stride)
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, types.float32, i, i, i, i, i), code

    return dot


float_dots = {(name, rows): _float_dot(name, rows) for name in DECODE for rows in ROWS}


def _nibbles(b: Builder, row: Value, chunk: Value) -> tuple[Value, Value]:
    """The 32 four-bit values of a chunk as two vectors of 16 bytes: byte i holds weights i and i + 16."""
    packed = load(b, b.add(row, b.mul(chunk, const(CHUNK // 2))), vector(I8))
    return b.and_(packed, splat_const(I8, 15)), b.lshr(packed, splat_const(I8, 4))


def _half_to_float(b: Builder, address: Value) -> Value:
    return b.fpext(load(b, address, F16), F32)


def _scale(b: Builder, scales: Value, group: Value, half: bool) -> Value:
    if half:
        return _half_to_float(b, b.add(scales, b.mul(group, const(2))))
    return load(b, b.add(scales, b.mul(group, const(4))), F32)


def _w4_widener(half_scales: bool) -> Any:
    @intrinsic
    def widen(_t: Any, row: Any, scales: Any, zeros: Any, groups: Any, group_chunks: Any, out: Any) -> Any:
        """out[k] = (q[k] − z[g]) · s[g], float32."""

        def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
            row, scales, zeros, groups, group_chunks, out = a
            with cgutils.for_range(b, groups, intp=I64) as group:
                scale = splat(b, _scale(b, scales, group.index, half_scales))
                zero = splat(b, load(b, b.add(zeros, group.index), I8))
                first = b.mul(group.index, group_chunks)
                with cgutils.for_range(b, group_chunks, intp=I64) as loop:
                    chunk = b.add(first, loop.index)
                    for half, q in enumerate(_nibbles(b, row, chunk)):
                        k = b.add(b.mul(chunk, const(4 * CHUNK)), const(4 * LANES * half))
                        whole = b.sitofp(b.sext(b.sub(q, zero), vector(I32)), vector(F32))
                        store(b, b.fmul(whole, scale), b.add(out, k))
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, i, i, i, i, i), code

    return widen


w4_wideners = {half: _w4_widener(half) for half in (True, False)}


@intrinsic
def w4_pairs(_t: Any, row: Any, zeros: Any, groups: Any, group_chunks: Any, out: Any) -> Any:
    """out int16 [K / 2][2]: q − z of a row; weights i and i + 16 of a chunk beside each other."""

    def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        row, zeros, groups, group_chunks, out = a
        with cgutils.for_range(b, groups, intp=I64) as group:
            zero = splat(b, b.zext(load(b, b.add(zeros, group.index), I8), I16), 2 * LANES)
            first = b.mul(group.index, group_chunks)
            with cgutils.for_range(b, group_chunks, intp=I64) as loop:
                chunk = b.add(first, loop.index)
                packed = load(b, b.add(row, b.mul(chunk, const(CHUNK // 2))), vector(I8))
                both = b.zext(packed, vector(I32))
                both = b.or_(both, b.shl(both, splat_const(I32, 12)))
                both = b.and_(both, splat_const(I32, 0x000F000F))
                values = b.sub(b.bitcast(both, vector(I16, 2 * LANES)), zero)
                store(b, values, b.add(out, b.mul(chunk, const(2 * CHUNK))))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i, i), code


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


def _add_chunk(
    b: Builder, row: Value, zero: Value, chunk: Value, x: Value, x_stride: Value, parts: list[Value]
) -> None:
    """parts[m] += (q − z) · x[m] over the 32 weights of a chunk."""
    for half, q in enumerate(_nibbles(b, row, chunk)):
        k = b.add(b.mul(chunk, const(2 * CHUNK)), const(2 * LANES * half))
        weights = b.sext(b.sub(q, zero), vector(I16))
        for m, part in enumerate(parts):
            at = b.add(b.add(x, b.mul(x_stride, const(m))), k)
            pairs = multiply_add_pairs(b, weights, load(b, at, vector(I16)))
            b.store(b.add(b.load(part), pairs), part)


def _w4_dot(rows: int, half_scales: bool) -> Any:
    @intrinsic
    def dot(
        _t: Any,
        row: Any,
        scales: Any,
        zeros: Any,
        groups: Any,
        group_chunks: Any,
        x: Any,
        x_stride: Any,
        x_scales: Any,
        out: Any,
        out_stride: Any,
    ) -> Any:
        """out[m] = Σ_g s[g] · x_scales[m][g] · Σ_{k in g} (q[k] − z[g]) · x[m][k]; the inner sum is exact.

        x int16, x_scales float32; s float16 or float32, z uint8.
        """

        def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
            row, scales, zeros, groups, group_chunks, x, x_stride, x_scales, out, out_stride = a
            wholes = _accumulators(b, rows, splat_const(F32, 0.0, 8))
            parts = [cgutils.alloca_once(b, vector(I32, 8)) for _ in range(rows)]
            pair = b.icmp_signed("==", group_chunks, const(2))
            with cgutils.for_range(b, groups, intp=I64) as group:
                zero = splat(b, load(b, b.add(zeros, group.index), I8))
                for part in parts:
                    b.store(splat_const(I32, 0, 8), part)
                first = b.mul(group.index, group_chunks)
                # Groups of 64 without a loop are a tenth faster.
                with b.if_else(pair) as (then, otherwise):
                    with then:
                        for i in range(2):
                            _add_chunk(b, row, zero, b.add(first, const(i)), x, x_stride, parts)
                    with otherwise, cgutils.for_range(b, group_chunks, intp=I64) as loop:
                        _add_chunk(b, row, zero, b.add(first, loop.index), x, x_stride, parts)
                scale = _scale(b, scales, group.index, half_scales)
                for m in range(rows):
                    at = b.add(b.mul(groups, const(4 * m)), b.mul(group.index, const(4)))
                    by = b.fmul(scale, load(b, b.add(x_scales, at), F32))
                    product = b.fmul(b.sitofp(b.load(parts[m]), vector(F32, 8)), splat(b, by, 8))
                    b.store(b.fadd(b.load(wholes[m]), product), wholes[m])
            empty, lanes = splat_const(F32, 0.0, 8), ir.Constant(vector(I32), list(range(LANES)))
            sums = [b.shuffle_vector(b.load(whole), empty, lanes) for whole in wholes]
            _finish(b, sums, ir.Constant(F32, 1.0), out, out_stride)
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, i, i, i, i, i, i, i, i, i), code

    return dot


w4_dots = {(rows, half): _w4_dot(rows, half) for rows in W4_ROWS for half in (True, False)}


def _int8_dot(rows: int) -> Any:
    @intrinsic
    def dot(_t: Any, row: Any, x: Any, x_stride: Any, chunks: Any, out: Any, out_stride: Any) -> Any:
        """out[m] = float(Σ_k row[k] · x[m][k]) of int8 weights and int8-valued int16 x; exact."""

        def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
            row, x, x_stride, chunks, out, out_stride = a
            sums = _accumulators(b, rows, splat_const(I32, 0, 8))
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
