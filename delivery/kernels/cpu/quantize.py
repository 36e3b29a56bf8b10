"""Activations in the steps of integers and of 8-bit floats, a row at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from delivery.kernels.cpu.ir import (
    CHUNK,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Builder,
    Value,
    call,
    const,
    load,
    nearest,
    read_f32,
    splat,
    splat_const,
    store,
    total_i32,
    vector,
    write_f32,
    write_i16,
)

MOST_INT = 32639
"""Largest magnitude of activations as integers: 127 · 256 + 127, whose two bytes are signed ones."""
NO_QUANT, QUANT_INT8, QUANT_E4M3, QUANT_E5M2 = range(4)


@intrinsic
def _as_float(_t: Any, bits: Any) -> Any:
    def code(_context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        return b.bitcast(a[0], F32)

    return types.float32(types.int32), code


@intrinsic
def _as_bits(_t: Any, value: Any) -> Any:
    def code(_context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        return b.bitcast(a[0], I32)

    return types.int32(types.float32), code


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def _round_float(value: np.float32, dropped: int, smallest: np.float32) -> np.float32:
    """value rounded to a float of 23 − dropped mantissa bits, ties to even; below `smallest`, to its step."""
    if abs(value) < smallest:
        step = smallest * np.float32(2.0 ** (dropped - 23))
        return np.float32(np.rint(value / step)) * step
    bits = _as_bits(value)
    half = np.int32((1 << (dropped - 1)) - 1)
    bits += half + ((bits >> dropped) & np.int32(1))
    return _as_float(bits & ~np.int32((1 << dropped) - 1))


@intrinsic
def peak(_t: Any, x: Any, count: Any) -> Any:
    """The largest magnitude of `count` floats, a multiple of 16; NaN where there is one.

    Magnitudes are in the order of their bits, and NaN is beyond infinity.
    """

    def code(_context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        peak = cgutils.alloca_once_value(b, splat_const(I32, 0))
        with cgutils.for_range(b, b.udiv(a[1], const(LANES)), intp=I64) as loop:
            bits = load(b, b.add(a[0], b.mul(loop.index, const(4 * LANES))), vector(I32))
            bits = b.and_(bits, splat_const(I32, 0x7FFFFFFF))
            b.store(call(b, "llvm.smax.v16i32", bits.type, [b.load(peak), bits]), peak)
        return b.bitcast(call(b, "llvm.vector.reduce.smax.v16i32", I32, [b.load(peak)]), F32)

    return types.float32(types.int64, types.int64), code


@intrinsic
def _to_int16(_t: Any, x: Any, inverse: Any, out: Any, count: Any) -> Any:
    """out [count] int16 = round(x · inverse), for a multiple of 16."""

    def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        by = splat(b, a[1])
        with cgutils.for_range(b, b.udiv(a[3], const(LANES)), intp=I64) as loop:
            values = load(b, b.add(a[0], b.mul(loop.index, const(4 * LANES))), vector(F32))
            whole = b.fptosi(nearest(b, b.fmul(values, by)), vector(I32))
            store(b, b.trunc(whole, vector(I16)), b.add(a[2], b.mul(loop.index, const(2 * LANES))))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, types.float32, i, i), code


def _whole(b: Builder, x: Value, at: Value, by: Value) -> Value:
    """round(x · by) of 16 floats from position `at`, int32."""
    values = load(b, b.add(x, b.mul(at, const(4))), vector(F32))
    return b.fptosi(nearest(b, b.fmul(values, by)), vector(I32))


@intrinsic
def _to_bytes(_t: Any, x: Any, inverse: Any, high: Any, low: Any, chunks: Any) -> Any:
    """round(x · inverse) as signed bytes, high · 256 + low; their sum."""

    def code(_context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        x, inverse, high, low, chunks = a
        by, sums = splat(b, inverse), cgutils.alloca_once_value(b, splat_const(I32, 0))
        with cgutils.for_range(b, b.mul(chunks, const(CHUNK // LANES)), intp=I64) as loop:
            at = b.mul(loop.index, const(LANES))
            whole = _whole(b, x, at, by)
            b.store(b.add(b.load(sums), whole), sums)
            upper = b.ashr(b.add(whole, splat_const(I32, 128)), splat_const(I32, 8))
            store(b, b.trunc(upper, vector(I8)), b.add(high, at))
            store(b, b.trunc(whole, vector(I8)), b.add(low, at))
        return total_i32(b, b.load(sums))

    i = types.int64
    return types.int32(i, types.float32, i, i, i), code


@intrinsic
def _to_words(_t: Any, x: Any, inverse: Any, out: Any, chunks: Any) -> Any:
    """out int16 = round(x · inverse), of a chunk the first two of every four before the others; their sum."""

    def code(_context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        by, sums = splat(b, a[1]), cgutils.alloca_once_value(b, splat_const(I32, 0))
        order = [i for first in (0, 2) for k in range(first, CHUNK, 4) for i in (k, k + 1)]
        with cgutils.for_range(b, a[3], intp=I64) as loop:
            at = b.mul(loop.index, const(CHUNK))
            halves = [_whole(b, a[0], b.add(at, const(LANES * i)), by) for i in range(CHUNK // LANES)]
            b.store(b.add(b.load(sums), b.add(*halves)), sums)
            words = [b.trunc(half, vector(I16)) for half in halves]
            mixed = b.shuffle_vector(*words, ir.Constant(vector(I32, CHUNK), order))
            store(b, mixed, b.add(a[2], b.mul(at, const(2))))
        return total_i32(b, b.load(sums))

    i = types.int64
    return types.int32(i, types.float32, i, i), code


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def at_least(least: np.float32, value: np.float32) -> np.float32:
    """The larger one; NaN stays NaN, so that a row with one has it in its results."""
    return least if value < least else value


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def _scale_of(x: int, count: int) -> np.float32:
    return at_least(np.float32(1e-30), peak(x, count) / np.float32(MOST_INT))


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def quantize_bytes(x: int, k: int, group: int, out: int, scales: int) -> None:
    """A row of whole groups: out int8 high [K], low [K], float32 sums [groups]; float32 scales [groups]."""
    for g in range(k // group):
        scale = _scale_of(x + 4 * g * group, group)
        write_f32(scales + 4 * g, scale)
        high = out + g * group
        whole = _to_bytes(x + 4 * g * group, np.float32(1.0) / scale, high, high + k, group // CHUNK)
        write_f32(out + 2 * k + 4 * g, np.float32(whole))


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def quantize_words(x: int, k: int, group: int, out: int, scales: int) -> None:
    """The same with out int16 [K], in the order of `_to_words`, float32 sums [groups]."""
    for g in range(k // group):
        scale = _scale_of(x + 4 * g * group, group)
        write_f32(scales + 4 * g, scale)
        to = out + 2 * g * group
        whole = _to_words(x + 4 * g * group, np.float32(1.0) / scale, to, group // CHUNK)
        write_f32(out + 2 * k + 4 * g, np.float32(whole))


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def quantize_row(x: int, k: int, mode: int, fixed: int, out: int) -> np.float32:
    """One padded row in the steps of a dtype: int16 for int8, float32 for fp8; returns its scale."""
    limit = np.float32(127.0)
    if mode == QUANT_E4M3:
        limit = np.float32(448.0)
    elif mode == QUANT_E5M2:
        limit = np.float32(57344.0)
    if fixed != 0:
        scale = read_f32(fixed)
    else:
        scale = at_least(np.float32(1e-12), peak(x, k)) / limit
        if mode == QUANT_INT8:
            _to_int16(x, np.float32(1.0) / scale, out, k)
            return scale
    for at in range(k):
        value = min(max(read_f32(x + 4 * at) / scale, -limit), limit)
        if mode == QUANT_INT8:
            write_i16(out + 2 * at, np.int16(np.rint(value)))
        elif mode == QUANT_E4M3:
            write_f32(out + 4 * at, _round_float(value, 20, np.float32(2.0**-6)))
        else:
            write_f32(out + 4 * at, _round_float(value, 21, np.float32(2.0**-14)))
    return scale
