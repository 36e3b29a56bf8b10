"""4-bit weights in groups, as LLVM intrinsics: decoded, and their inner products with a few rows.

Activations are integers of 16 bits. One row alone is multiplied byte by byte: an instruction multiplies 32
weights, which are unsigned, with 32 high or low bytes and adds pairs into 16 bits, which hold the sums of 8
chunks; what zero points take away is their product with the sum of a group's activations. Several rows
share weights that are widened to 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
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


def _words(b: Builder, row: Value, chunk: Value, zero: Value) -> list[Value]:
    """q − z of a chunk as int16: the first two of every four weights, and the last two."""
    q, nothing = _bytes(b, row, chunk), splat_const(I8, 0, CHUNK)
    made = []
    for first in (0, 2):
        lanes = [lane for i in range(first, CHUNK, 4) for lane in (i, CHUNK, i + 1, CHUNK)]
        wide = b.shuffle_vector(q, nothing, ir.Constant(vector(I32, CHUNK), lanes))
        made.append(b.sub(b.bitcast(wide, vector(I16)), zero))
    return made


@dataclass(frozen=True, slots=True)
class _Row:
    """One activation row as bytes (`quantize_bytes`): its sums over a group, in `part` int32 [8]."""

    x: list[Value]
    low: Value
    parts: list[Value]

    def begin(self, b: Builder, group: Value, zero: Value) -> None:
        """− z · Σ x, lane by lane."""
        at = b.add(b.add(self.x[0], b.mul(self.low, const(2))), b.mul(group, const(4 * 8)))
        taken = b.mul(splat(b, b.zext(zero, I32), 8), load(b, at, vector(I32, 8)))
        b.store(b.sub(splat_const(I32, 0, 8), taken), self.parts[0])

    def chunks(self, b: Builder, row: Value, chunks: list[Value], sums: list[Value]) -> list[Value]:
        """sums, int16 of the high and of the low bytes, with chunks added."""
        for chunk in chunks:
            q, at = _bytes(b, row, chunk), b.add(self.x[0], b.mul(chunk, const(CHUNK)))
            values = [load(b, place, vector(I8, CHUNK)) for place in (at, b.add(at, self.low))]
            sums = [b.add(part, multiply_add_bytes(b, q, v)) for part, v in zip(sums, values, strict=True)]
        return sums

    def add(self, b: Builder, sums: list[Value]) -> None:
        for part, by in zip(sums, (256, 1), strict=True):
            whole = multiply_add_pairs(b, part, splat_const(I16, by))
            b.store(b.add(b.load(self.parts[0]), whole), self.parts[0])

    def pair(self, b: Builder, row: Value, first: Value) -> None:
        nothing = splat_const(I16, 0)
        self.add(b, self.chunks(b, row, [first, b.add(first, const(1))], [nothing, nothing]))

    def loop(self, b: Builder, row: Value, first: Value, count: Value) -> None:
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
                for place, value in zip(
                    places, self.chunks(b, row, [chunk], [b.load(place) for place in places]), strict=True
                ):
                    b.store(value, place)
            self.add(b, [b.load(place) for place in places])


class _Rows:
    """Several activation rows as words (`quantize_words`), which share decoded weights. The lanes of their
    sums hold the same weights as `_Row`'s, so that a row's result does not depend on the rows beside it."""

    def __init__(self, x: list[Value], parts: list[Value]) -> None:
        self.x, self.parts = x, parts

    def begin(self, b: Builder, group: Value, zero: Value) -> None:
        self.zero = splat(b, b.zext(zero, I16))
        for part in self.parts:
            b.store(splat_const(I32, 0, 8), part)

    def chunk(self, b: Builder, row: Value, chunk: Value) -> None:
        words, at = _words(b, row, chunk, self.zero), b.mul(chunk, const(2 * CHUNK))
        for x, part in zip(self.x, self.parts, strict=True):
            for half, weights in enumerate(words):
                values = load(b, b.add(b.add(x, at), const(2 * LANES * half)), vector(I16))
                b.store(b.add(b.load(part), multiply_add_pairs(b, weights, values)), part)

    def pair(self, b: Builder, row: Value, first: Value) -> None:
        for i in range(2):
            self.chunk(b, row, b.add(first, const(i)))

    def loop(self, b: Builder, row: Value, first: Value, count: Value) -> None:
        with cgutils.for_range(b, count, intp=I64) as loop:
            self.chunk(b, row, b.add(first, loop.index))


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

        x as `quantize_bytes` (one row) or `quantize_words` leave it; x_scales float32; s float16 or
        float32, z uint8.
        """

        def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
            row, scales, zeros, groups, group_chunks, x, x_stride, x_scales, out, out_stride = a
            wholes = accumulators(b, rows, splat_const(F32, 0.0, 8))
            parts = accumulators(b, rows, splat_const(I32, 0, 8))
            xs = [b.add(x, b.mul(x_stride, const(m))) for m in range(rows)]
            low = b.mul(b.mul(groups, group_chunks), const(CHUNK))
            sums = _Row(xs, low, parts) if rows == 1 else _Rows(xs, parts)
            pair = b.icmp_signed("==", group_chunks, const(2))
            with cgutils.for_range(b, groups, intp=I64) as group:
                sums.begin(b, group.index, load(b, b.add(zeros, group.index), I8))
                first = b.mul(group.index, group_chunks)
                # Groups of 64 without a loop are faster.
                with b.if_else(pair) as (then, otherwise):
                    with then:
                        sums.pair(b, row, first)
                    with otherwise:
                        sums.loop(b, row, first, group_chunks)
                scale = _scale(b, scales, group.index, half_scales)
                for m in range(rows):
                    at = b.add(b.mul(groups, const(4 * m)), b.mul(group.index, const(4)))
                    by = splat(b, b.fmul(scale, load(b, b.add(x_scales, at), F32)), 8)
                    whole = b.sitofp(b.load(parts[m]), vector(F32, 8))
                    b.store(fma(b, whole, by, b.load(wholes[m])), wholes[m])
            empty, lanes = splat_const(F32, 0.0, 8), ir.Constant(vector(I32), list(range(LANES)))
            totals = [b.shuffle_vector(b.load(whole), empty, lanes) for whole in wholes]
            write_totals(b, totals, ir.Constant(F32, 1.0), out, out_stride)
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, i, i, i, i, i, i, i, i, i), code

    return dot


w4_dots = {(rows, half): _w4_dot(rows, half) for rows in W4_ROWS for half in (True, False)}
