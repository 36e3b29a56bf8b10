"""Decode attention of a CPU program: rotary, cache write and attention of one key head of one request.

Everything that a key-value head needs lies with it and its query heads, so one claimed piece does all of
it without waiting for the others. Two passes over the context: scores first, then values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from delivery.kernels.cpu.ir import (
    F32,
    I64,
    KERNEL,
    LANES,
    Builder,
    Value,
    const,
    exp,
    fma,
    kernel,
    largest,
    largest_of,
    load,
    read_f32,
    read_i32,
    read_i64,
    splat,
    splat_const,
    store,
    total,
    vector,
    write_f32,
)

(
    Q,
    K,
    V,
    Q_STRIDE,
    KV_STRIDE,
    KV_HEADS,
    GROUP,
    HEAD_DIM,
    HALF,
    COS,
    SIN,
    ROPE_ROWS,
    K_CACHE,
    V_CACHE,
    BLOCK_SIZE,
    BLOCK_TABLE,
    TABLE_STRIDE,
    CONTEXT,
    SLOTS,
    OUT,
    OUT_STRIDE,
    FLOATS,
    WINDOW,
    Q_NORM,
    K_NORM,
    SCRATCH,
    SCRATCH_BYTES,
) = range(3, 30)
# FLOATS points at float32: attention scale, soft-cap (0 for none), epsilon of the head norms.


@intrinsic
def _dot(_t: Any, x: Any, y: Any, count: Any) -> Any:
    """Σ x[i] · y[i] over a multiple of 16 floats."""

    def code(_context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        sums = cgutils.alloca_once_value(b, splat_const(F32, 0.0))
        with cgutils.for_range(b, b.udiv(a[2], const(LANES)), intp=I64) as loop:
            at = b.mul(loop.index, const(4 * LANES))
            x, y = (load(b, b.add(a[i], at), vector(F32)) for i in (0, 1))
            b.store(fma(b, x, y, b.load(sums)), sums)
        return total(b, b.load(sums))

    i = types.int64
    return types.float32(i, i, i), code


@intrinsic
def _add_scaled(_t: Any, out: Any, x: Any, by: Any, count: Any) -> Any:
    """out += by · x over a multiple of 16 floats."""

    def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        by = splat(b, a[2])
        with cgutils.for_range(b, b.udiv(a[3], const(LANES)), intp=I64) as loop:
            at = b.mul(loop.index, const(4 * LANES))
            out, x = (load(b, b.add(a[i], at), vector(F32)) for i in (0, 1))
            store(b, fma(b, x, by, out), b.add(a[0], at))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, types.float32, i), code


@intrinsic
def copy(_t: Any, out: Any, x: Any, count: Any) -> Any:
    """out = x over a multiple of 16 floats."""

    def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        with cgutils.for_range(b, b.udiv(a[2], const(LANES)), intp=I64) as loop:
            at = b.mul(loop.index, const(4 * LANES))
            store(b, load(b, b.add(a[1], at), vector(F32)), b.add(a[0], at))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i), code


@intrinsic
def highest(_t: Any, x: Any, vectors: Any) -> Any:
    """The largest of vectors · 16 floats."""

    def code(_context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        peak = cgutils.alloca_once_value(b, splat_const(F32, -3.0e38))
        with cgutils.for_range(b, a[1], intp=I64) as loop:
            values = load(b, b.add(a[0], b.mul(loop.index, const(4 * LANES))), vector(F32))
            b.store(largest(b, b.load(peak), values), peak)
        return largest_of(b, b.load(peak))

    return types.float32(types.int64, types.int64), code


@intrinsic
def exp_below(_t: Any, x: Any, peak: Any, vectors: Any) -> Any:
    """x = e^(x − peak) in place over vectors · 16 floats; the sum."""

    def code(_context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        sums = cgutils.alloca_once_value(b, splat_const(F32, 0.0))
        peak = splat(b, a[1])
        with cgutils.for_range(b, a[2], intp=I64) as loop:
            at = b.add(a[0], b.mul(loop.index, const(4 * LANES)))
            values = exp(b, b.fsub(load(b, at, vector(F32)), peak))
            b.store(b.fadd(b.load(sums), values), sums)
            store(b, values, at)
        return total(b, b.load(sums))

    return types.float32(types.int64, types.float32, types.int64), code


@intrinsic
def scale_into(_t: Any, out: Any, x: Any, by: Any, count: Any) -> Any:
    """out = by · x over a multiple of 16 floats; out may be x."""

    def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        by = splat(b, a[2])
        with cgutils.for_range(b, b.udiv(a[3], const(LANES)), intp=I64) as loop:
            at = b.mul(loop.index, const(4 * LANES))
            store(b, b.fmul(load(b, b.add(a[1], at), vector(F32)), by), b.add(a[0], at))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, types.float32, i), code


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def _norm(head: int, size: int, weight: int, eps: np.float32) -> None:
    by = np.float32(1.0) / np.float32(math.sqrt(_dot(head, head, size) / np.float32(size) + eps))
    for i in range(size):
        write_f32(head + 4 * i, read_f32(head + 4 * i) * by * read_f32(weight + 4 * i))


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def _rotate(head: int, half: int, cos: int, sin: int) -> None:
    for i in range(half):
        a, b = read_f32(head + 4 * i), read_f32(head + 4 * (half + i))
        c, s = read_f32(cos + 4 * i), read_f32(sin + 4 * i)
        write_f32(head + 4 * i, a * c - b * s)
        write_f32(head + 4 * (half + i), b * c + a * s)


def scratch_bytes(context: int, group: int) -> int:
    """Scratch of one thread: scores of a group of query heads over the longest context."""
    return (-(-context // LANES) * LANES + LANES) * group * 4


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def _turn(op: int, m: int, q: int, k: int, eps: np.float32) -> None:
    """Head norms where the model has them, then the rotation, of a key head and its query heads."""
    group, size, half = read_i64(op + 8 * GROUP), read_i64(op + 8 * HEAD_DIM), read_i64(op + 8 * HALF)
    row = read_i64(read_i64(op + 8 * ROPE_ROWS) + 8 * m)
    cos = read_i64(op + 8 * COS) + 4 * row * half
    sin = read_i64(op + 8 * SIN) + 4 * row * half
    q_norm, k_norm = read_i64(op + 8 * Q_NORM), read_i64(op + 8 * K_NORM)
    if k_norm != 0:
        _norm(k, size, k_norm, eps)
    _rotate(k, half, cos, sin)
    for h in range(group):
        if q_norm != 0:
            _norm(q + 4 * h * size, size, q_norm, eps)
        _rotate(q + 4 * h * size, half, cos, sin)


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def store_row(op: int, m: int, head: int) -> None:
    """Rotate a key head and its query heads of row m in place; keep key and value at the row's slot."""
    kv_heads, group, size = (
        read_i64(op + 8 * KV_HEADS),
        read_i64(op + 8 * GROUP),
        read_i64(op + 8 * HEAD_DIM),
    )
    q = read_i64(op + 8 * Q) + m * read_i64(op + 8 * Q_STRIDE) + 4 * head * group * size
    kv_offset = m * read_i64(op + 8 * KV_STRIDE) + 4 * head * size
    k, v = read_i64(op + 8 * K) + kv_offset, read_i64(op + 8 * V) + kv_offset
    _turn(op, m, q, k, read_f32(read_i64(op + 8 * FLOATS) + 8))
    slot = read_i64(read_i64(op + 8 * SLOTS) + 8 * m)
    if slot < 0:
        return
    at = 4 * (slot * kv_heads + head) * size
    copy(read_i64(op + 8 * K_CACHE) + at, k, size)
    copy(read_i64(op + 8 * V_CACHE) + at, v, size)


@kernel(KERNEL)
def run(op: int, thread: int, piece: int) -> None:
    """Head `piece % kv_heads` of row `piece // kv_heads`."""
    kv_heads, group, size = (
        read_i64(op + 8 * KV_HEADS),
        read_i64(op + 8 * GROUP),
        read_i64(op + 8 * HEAD_DIM),
    )
    m, head = piece // kv_heads, piece % kv_heads
    q = read_i64(op + 8 * Q) + m * read_i64(op + 8 * Q_STRIDE) + 4 * head * group * size
    out = read_i64(op + 8 * OUT) + m * read_i64(op + 8 * OUT_STRIDE) + 4 * head * group * size
    context = int(read_i32(read_i64(op + 8 * CONTEXT) + 4 * m))
    if context == 0:  # padding
        for i in range(group * size):
            write_f32(out + 4 * i, np.float32(0.0))
        return
    store_row(op, m, head)
    floats = read_i64(op + 8 * FLOATS)
    block_size = read_i64(op + 8 * BLOCK_SIZE)
    token_bytes = 4 * kv_heads * size
    k_cache = read_i64(op + 8 * K_CACHE) + 4 * head * size
    v_cache = read_i64(op + 8 * V_CACHE) + 4 * head * size
    window = read_i64(op + 8 * WINDOW)
    first = max(0, context - window) if window > 0 else 0
    table = read_i64(op + 8 * BLOCK_TABLE) + m * read_i64(op + 8 * TABLE_STRIDE)
    scores = read_i64(op + 8 * SCRATCH) + thread * read_i64(op + 8 * SCRATCH_BYTES)
    count = context - first
    vectors = (count + LANES - 1) // LANES
    scale, cap = read_f32(floats), read_f32(floats + 4)
    for position in range(first, context):
        block = int(read_i32(table + 4 * (position // block_size)))
        at = k_cache + (block * block_size + position % block_size) * token_bytes
        for h in range(group):
            score = _dot(q + 4 * h * size, at, size) * scale
            if cap > 0:
                score = cap * np.float32(math.tanh(score / cap))
            write_f32(scores + 4 * (h * vectors * LANES + position - first), score)
    for h in range(group):
        line = scores + 4 * h * vectors * LANES
        for i in range(count, vectors * LANES):
            write_f32(line + 4 * i, np.float32(-3.0e38))
        by = np.float32(1.0) / exp_below(line, highest(line, vectors), vectors)
        for i in range(count):
            write_f32(line + 4 * i, read_f32(line + 4 * i) * by)
    for i in range(group * size):
        write_f32(out + 4 * i, np.float32(0.0))
    for position in range(first, context):
        block = int(read_i32(table + 4 * (position // block_size)))
        at = v_cache + (block * block_size + position % block_size) * token_bytes
        for h in range(group):
            by = read_f32(scores + 4 * (h * vectors * LANES + position - first))
            _add_scaled(out + 4 * h * size, at, by, size)
