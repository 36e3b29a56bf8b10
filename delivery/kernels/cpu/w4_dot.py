"""4-bit weights in groups, as LLVM intrinsics: decoded, and their inner products with a few rows.

Activations are integers of 16 bits. One row alone is multiplied byte by byte: an instruction multiplies 32
weights, which are unsigned, with 32 high or low bytes and adds pairs into 16 bits, which hold the sums of 8
chunks. Several rows share weights that are widened to 16 bits. Either way the same weights meet in a lane, so
that a row's result does not depend on the rows beside it. What zero points take away is their product with
the sum of a group's activations; this and the scales are prepared for eight groups at once.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from delivery.kernels.cpu.dot import accumulators, write_totals
from delivery.kernels.cpu.ir import (
    CHUNK,
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
    multiply_add_bytes,
    multiply_add_pairs,
    splat,
    splat_const,
    store,
    vector,
)

W4_ROWS = (1, 2, 4)
_MOST_CHUNKS = 8
"""Chunks whose sums of bytes of 4 and 8 bits fit into 16: 8 · 2 · 15 · 128 = 30720."""


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


def _bytes(b: Builder, row: Value, chunk: Value) -> Value:
    """The 32 four-bit values of a chunk as bytes, in order."""
    packed = load(b, b.add(row, b.mul(chunk, const(CHUNK // 2))), vector(I64, 2))
    twice = b.shuffle_vector(packed, packed, ir.Constant(vector(I32, 4), [0, 1, 0, 1]))
    shifted = b.lshr(twice, ir.Constant(vector(I64, 4), [0, 0, 4, 4]))
    return b.and_(b.bitcast(shifted, vector(I8, CHUNK)), splat_const(I8, 15, CHUNK))


def _words(b: Builder, row: Value, chunk: Value) -> list[Value]:
    """The values of a chunk as int16: the first two of every four weights, and the last two."""
    q, nothing = _bytes(b, row, chunk), splat_const(I8, 0, CHUNK)
    made = []
    for first in (0, 2):
        lanes = [lane for i in range(first, CHUNK, 4) for lane in (i, CHUNK, i + 1, CHUNK)]
        wide = b.shuffle_vector(q, nothing, ir.Constant(vector(I32, CHUNK), lanes))
        made.append(b.bitcast(wide, vector(I16)))
    return made


def _add_bytes(
    b: Builder, row: Value, chunk: Value, x: list[Value], low: Value, sums: list[Value]
) -> list[Value]:
    """int16 sums of a row's high and of its low bytes, with a chunk added."""
    q, at = _bytes(b, row, chunk), b.add(x[0], b.mul(chunk, const(CHUNK)))
    values = [load(b, place, vector(I8, CHUNK)) for place in (at, b.add(at, low))]
    return [b.add(part, multiply_add_bytes(b, q, value)) for part, value in zip(sums, values, strict=True)]


def _flush(b: Builder, sums: list[Value], part: Value) -> None:
    for bytes_, worth in zip(sums, (256, 1), strict=True):
        whole = multiply_add_pairs(b, bytes_, splat_const(I16, worth))
        b.store(b.add(b.load(part), whole), part)


def _byte_group(
    b: Builder, row: Value, first: Value, count: Value, x: list[Value], low: Value, parts: list[Value]
) -> None:
    """One row's sums over `count` chunks, which pass through 16 bits eight at a time."""
    blocks = b.udiv(b.add(count, const(_MOST_CHUNKS - 1)), const(_MOST_CHUNKS))
    places = accumulators(b, 2, splat_const(I16, 0))
    with cgutils.for_range(b, blocks, intp=I64) as block:
        done = b.mul(block.index, const(_MOST_CHUNKS))
        left = b.sub(count, done)
        few = b.icmp_signed("<", left, const(_MOST_CHUNKS))
        for place in places:
            b.store(splat_const(I16, 0), place)
        with cgutils.for_range(b, b.select(few, left, const(_MOST_CHUNKS)), intp=I64) as loop:
            chunk = b.add(b.add(first, done), loop.index)
            sums = _add_bytes(b, row, chunk, x, low, [b.load(place) for place in places])
            for place, value in zip(places, sums, strict=True):
                b.store(value, place)
        _flush(b, [b.load(place) for place in places], parts[0])


def _add_words(b: Builder, row: Value, chunk: Value, x: list[Value], parts: list[Value]) -> None:
    """Several rows' sums with a chunk added, in the lanes in which `_flush` leaves the same weights."""
    words, at = _words(b, row, chunk), b.mul(chunk, const(2 * CHUNK))
    for start, part in zip(x, parts, strict=True):
        for half, weights in enumerate(words):
            values = load(b, b.add(b.add(start, at), const(2 * LANES * half)), vector(I16))
            b.store(b.add(b.load(part), multiply_add_pairs(b, weights, values)), part)


def _group(
    b: Builder, row: Value, first: Value, count: Value, x: list[Value], low: Value, parts: list[Value]
) -> None:
    """parts[m], int32 [8] = Σ q · x[m] over the chunks of a group."""
    for part in parts:
        b.store(splat_const(I32, 0, 8), part)
    # Groups of 64 without a loop are faster.
    with b.if_else(b.icmp_signed("==", count, const(2))) as (then, otherwise):
        with then:
            sums = [splat_const(I16, 0)] * 2
            for chunk in (first, b.add(first, const(1))):
                if len(x) == 1:
                    sums = _add_bytes(b, row, chunk, x, low, sums)
                else:
                    _add_words(b, row, chunk, x, parts)
            if len(x) == 1:
                _flush(b, sums, parts[0])
        with otherwise:
            if len(x) == 1:
                _byte_group(b, row, first, count, x, low, parts)
            else:
                with cgutils.for_range(b, count, intp=I64) as loop:
                    _add_words(b, row, b.add(first, loop.index), x, parts)


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
        """out[m] = Σ_g s[g] · x_scales[m][g] · (Σ_{k in g} q[k] · x[m][k] − z[g] · Σ_{k in g} x[m][k]).

        Sums of integers are exact. x as `quantize_bytes` (one row) or `quantize_words` leave it; s float16 or
        float32, z uint8.
        """

        def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
            row, scales, zeros, groups, group_chunks, x, x_stride, x_scales, out, out_stride = a
            low = b.mul(b.mul(groups, group_chunks), const(CHUNK))
            xs = [b.add(x, b.mul(x_stride, const(m))) for m in range(rows)]
            x_sums = [b.add(start, b.mul(low, const(2))) for start in xs]
            by_rows = [b.add(x_scales, b.mul(groups, const(4 * m))) for m in range(rows)]
            wholes, less = (accumulators(b, rows, splat_const(F32, 0.0, 8)) for _ in range(2))
            parts = accumulators(b, rows, splat_const(I32, 0, 8))
            kind = F16 if half_scales else F32
            factors = [cgutils.alloca_once(b, vector(F32, 8)) for _ in range(rows)]
            lanes = [b.ptrtoint(place, I64) for place in factors]

            def weigh(first: Value, count: int) -> None:
                """Scales of `count` groups, 8 or 1, for each row, and what their zero points take away."""

                def some(address: Value, stored: ir.Type) -> Value:
                    at = b.add(address, b.mul(first, const({F16: 2, F32: 4, I8: 1}[stored])))
                    if count == 8:
                        return load(b, at, vector(stored, 8))
                    empty = ir.Constant(vector(stored, 8), None)
                    return b.insert_element(empty, load(b, at, stored), ir.Constant(I32, 0))

                scale = some(scales, kind)
                scale = b.fpext(scale, vector(F32, 8)) if half_scales else scale
                zero = b.uitofp(some(zeros, I8), vector(F32, 8))
                for m in range(rows):
                    by = b.fmul(scale, some(by_rows[m], F32))
                    store(b, by, lanes[m])
                    taken = b.fmul(zero, some(x_sums[m], F32))
                    b.store(fma(b, by, taken, b.load(less[m])), less[m])

            def add(group: Value, lane: Value) -> None:
                first = b.mul(group, group_chunks)
                _group(b, row, first, group_chunks, xs, low, parts)
                for m in range(rows):
                    by = splat(b, load(b, b.add(lanes[m], b.mul(lane, const(4))), F32), 8)
                    whole = b.sitofp(b.load(parts[m]), vector(F32, 8))
                    b.store(fma(b, whole, by, b.load(wholes[m])), wholes[m])

            eights = b.udiv(groups, const(8))
            with cgutils.for_range(b, eights, intp=I64) as block:
                first = b.mul(block.index, const(8))
                weigh(first, 8)
                with cgutils.for_range(b, const(8), intp=I64) as loop:
                    add(b.add(first, loop.index), loop.index)
            with cgutils.for_range_slice(
                b, b.mul(eights, const(8)), groups, const(1), intp=I64, inc=True
            ) as (group, _):
                weigh(group, 1)
                add(group, const(0))
            empty, wide = splat_const(F32, 0.0, 8), ir.Constant(vector(I32), list(range(LANES)))
            sums = [b.fsub(b.load(w), b.load(taken)) for w, taken in zip(wholes, less, strict=True)]
            totals = [b.shuffle_vector(value, empty, wide) for value in sums]
            write_totals(b, totals, ir.Constant(F32, 1.0), out, out_stride)
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, i, i, i, i, i, i, i, i, i), code

    return dot


w4_dots = {(rows, half): _w4_dot(rows, half) for rows in W4_ROWS for half in (True, False)}
