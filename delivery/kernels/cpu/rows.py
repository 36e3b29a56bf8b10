"""Row operations of a CPU program: embedding, norms, the MLP's activation when it is not fused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from delivery.kernels.cpu.ir import (
    DECODE,
    F32,
    I64,
    KERNEL,
    LANES,
    Builder,
    Decode,
    Value,
    const,
    fma,
    kernel,
    load,
    read_f32,
    read_i32,
    read_i64,
    splat,
    splat_const,
    store,
    total,
    vector,
)

# Embedding: token ids int32, table of a kind, padded rows out.
(E_IDS, E_TABLE, E_ROW_BYTES, E_KIND, E_SIZE, E_SCALE, E_OUT, E_OUT_STRIDE) = range(3, 11)
# Norm: out = norm(x + residual) · weight, residual += x; RESIDUAL 0: out = norm(x) · weight.
(N_X, N_X_STRIDE, N_RESIDUAL, N_RESIDUAL_STRIDE, N_WEIGHT, N_EPS, N_SIZE, N_OUT, N_OUT_STRIDE) = range(3, 12)


def widener(decode: Decode) -> Any:
    """An intrinsic that turns stored values into float32."""

    @intrinsic
    def widen(_t: Any, row: Any, by: Any, out: Any, vectors: Any) -> Any:
        """out = stored values · by, float32, over vectors · 16 values."""

        def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
            by = splat(b, a[1])
            with cgutils.for_range(b, a[3], intp=I64) as loop:
                k = b.mul(loop.index, const(LANES))
                store(b, b.fmul(decode(b, a[0], k), by), b.add(a[2], b.mul(k, const(4))))
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, types.float32, i, i), code

    return widen


_widen_f32, _widen_bf16, _widen_f16 = (widener(DECODE[n]) for n in ("float32", "bfloat16", "float16"))


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def widen(kind: int, row: int, by: np.float32, out: int, vectors: int) -> None:
    """A row in float32 (kind 0), bfloat16 (1) or float16 (2) as float32 times `by`."""
    if kind == 0:
        _widen_f32(row, by, out, vectors)
    elif kind == 1:
        _widen_bf16(row, by, out, vectors)
    else:
        _widen_f16(row, by, out, vectors)


@intrinsic
def _add_into(_t: Any, total_: Any, x: Any, vectors: Any) -> Any:
    """total += x; the sum of squares of the result."""

    def code(_context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        sums = cgutils.alloca_once_value(b, splat_const(F32, 0.0))
        with cgutils.for_range(b, a[2], intp=I64) as loop:
            at = b.mul(loop.index, const(4 * LANES))
            whole, x = (load(b, b.add(a[i], at), vector(F32)) for i in (0, 1))
            whole = b.fadd(whole, x)
            store(b, whole, b.add(a[0], at))
            b.store(fma(b, whole, whole, b.load(sums)), sums)
        return total(b, b.load(sums))

    i = types.int64
    return types.float32(i, i, i), code


@intrinsic
def _squares(_t: Any, x: Any, vectors: Any) -> Any:
    def code(_context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        sums = cgutils.alloca_once_value(b, splat_const(F32, 0.0))
        with cgutils.for_range(b, a[1], intp=I64) as loop:
            x = load(b, b.add(a[0], b.mul(loop.index, const(4 * LANES))), vector(F32))
            b.store(fma(b, x, x, b.load(sums)), sums)
        return total(b, b.load(sums))

    return types.float32(types.int64, types.int64), code


@intrinsic
def _weigh(_t: Any, x: Any, by: Any, weight: Any, out: Any, vectors: Any) -> Any:
    """out = x · by · weight."""

    def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        by = splat(b, a[1])
        with cgutils.for_range(b, a[4], intp=I64) as loop:
            at = b.mul(loop.index, const(4 * LANES))
            x, weight = (load(b, b.add(a[i], at), vector(F32)) for i in (0, 2))
            store(b, b.fmul(b.fmul(x, by), weight), b.add(a[3], at))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, types.float32, i, i, i), code


@kernel(KERNEL)
def embed(op: int, _thread: int, m: int) -> None:
    """One row of the embedding; its table's rows are whole vectors."""
    token = int(read_i32(read_i64(op + 8 * E_IDS) + 4 * m))
    row = read_i64(op + 8 * E_TABLE) + token * read_i64(op + 8 * E_ROW_BYTES)
    out = read_i64(op + 8 * E_OUT) + m * read_i64(op + 8 * E_OUT_STRIDE)
    vectors = (read_i64(op + 8 * E_SIZE) + LANES - 1) // LANES
    widen(read_i64(op + 8 * E_KIND), row, read_f32(op + 8 * E_SCALE), out, vectors)


@kernel(KERNEL)
def norm(op: int, _thread: int, m: int) -> None:
    """One row; rows are padded with zeros to whole vectors."""
    size = read_i64(op + 8 * N_SIZE)
    vectors = (size + LANES - 1) // LANES
    x = read_i64(op + 8 * N_X) + m * read_i64(op + 8 * N_X_STRIDE)
    residual = read_i64(op + 8 * N_RESIDUAL)
    if residual != 0:
        residual += m * read_i64(op + 8 * N_RESIDUAL_STRIDE)
        squares = _add_into(residual, x, vectors)
        x = residual
    else:
        squares = _squares(x, vectors)
    by = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(size) + read_f32(op + 8 * N_EPS)))
    out = read_i64(op + 8 * N_OUT) + m * read_i64(op + 8 * N_OUT_STRIDE)
    _weigh(x, by, read_i64(op + 8 * N_WEIGHT), out, vectors)
