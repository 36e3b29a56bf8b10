"""Rounding and quantising inside Triton programs, in forms that the interpreter runs too."""

from __future__ import annotations

import os

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def round_even(x):
    """float32, |x| < 2^22, rounded to an integer, ties to even: adding 1.5 · 2^23 leaves no fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_quantised(x, Q_MAX: tl.constexpr, dtype: tl.constexpr):
    """float32 as `dtype`: int8 rounds half to even, fp8 casts; both saturate at Q_MAX."""
    x = tl.minimum(tl.maximum(x, -Q_MAX), Q_MAX)
    if dtype == tl.int8:
        x = round_even(x)
    elif _INTERPRETED:
        # The interpreter's cast loses the carry from the mantissa into the exponent; a GPU's does not.
        if dtype == tl.float8e4nv:
            x = _on_grid(x, 20, 512.0)
        else:
            x = _on_grid(x, 21, 65536.0)
    return x.to(dtype)


@triton.jit
def _on_grid(x, DROPPED_BITS: tl.constexpr, SUBNORMALS_PER_ONE: tl.constexpr):
    bits = x.to(tl.int32, bitcast=True)
    half = (1 << (DROPPED_BITS - 1)) - 1
    kept = (bits + half + ((bits >> DROPPED_BITS) & 1)) & (-(1 << DROPPED_BITS))
    subnormal = round_even(x * SUBNORMALS_PER_ONE) / SUBNORMALS_PER_ONE
    smallest_normal = (1 << (23 - DROPPED_BITS)) / SUBNORMALS_PER_ONE
    return tl.where(tl.abs(x) < smallest_normal, subnormal, kept.to(tl.float32, bitcast=True))
