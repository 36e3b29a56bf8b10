"""Rounding and quantising inside Triton programs, in forms that the interpreter runs too."""

from __future__ import annotations

import os

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

_SIGMOID = tl.constexpr("""
{
.reg .f32 power;
ex2.approx.ftz.f32 power, $1;
add.ftz.f32 power, power, 0f3F800000;
rcp.approx.ftz.f32 $0, power;
}
""")


@triton.jit
def round_even(x):
    """float32, |x| < 2^22, rounded to an integer, ties to even: adding 1.5 · 2^23 leaves no fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def sigmoid(x):
    """1 / (1 + e^−x) of float32 by the card's own exponential and reciprocal, each within 2 units in the last
    place: division as a language defines it takes ten instructions more, which large steps wait for."""
    if _INTERPRETED:
        return tl.sigmoid(x)
    return tl.inline_asm_elementwise(
        _SIGMOID, "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def to_quantised(x, Q_MAX: tl.constexpr, dtype: tl.constexpr):
    """float32 as `dtype`: int8 rounds half to even, fp8 casts; both saturate at Q_MAX."""
    x = tl.minimum(tl.maximum(x, -Q_MAX), Q_MAX)
    if dtype == tl.int8:
        # The sum's lowest byte is the integer already: a conversion would take a slow unit, four a cycle.
        return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    if _INTERPRETED:
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
