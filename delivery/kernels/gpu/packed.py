"""Quantised cache values to fp16 tensor-core operands, two bytes at a time.

A tile is read as 16-bit words, which matrix loads move (and transpose) in hardware; each word holds a
value or two of every *part* of the head, and the parts multiply one after another:

int8, fp8   part p, lane i   feature 2 i + p
int4        part p, lane i   feature 2 i + p // 2 + (p % 2) · head_dim / 2

Packed arithmetic turns both words of a register into fp16 at once: a lop3 puts the bits into the mantissa
of 1024 + u, a subtraction takes the bias away (Kim et al. 2022, arXiv:2211.10017). fp16 holds every int8,
e4m3 and 4-bit value exactly. The interpreter, and float32 queries, take the plain way to the same values.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

_INT8 = tl.constexpr("""
{
.reg .b32 upper, bias;
mov.b32 bias, 0x64806480;
shr.u32 upper, $2, 8;
lop3.b32 $0, $2, 0x00ff00ff, 0x64806480, 0x6a;
lop3.b32 $1, upper, 0x00ff00ff, 0x64806480, 0x6a;
sub.rn.f16x2 $0, $0, bias;
sub.rn.f16x2 $1, $1, bias;
}
""")
_FP8 = tl.constexpr("""
{
.reg .b16 a, b;
.reg .b32 x, y;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 x, a;
cvt.rn.f16x2.e4m3x2 y, b;
prmt.b32 $0, x, y, 0x5410;
prmt.b32 $1, x, y, 0x7632;
}
""")
_INT4 = tl.constexpr("""
{
.reg .b32 upper, bias, sixteenth, offset;
mov.b32 bias, 0x64006400;
mov.b32 sixteenth, 0x2c002c00;
mov.b32 offset, 0xd400d400;
shr.u32 upper, $4, 8;
lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 $2, upper, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $3, upper, 0x00f000f0, 0x64006400, 0xea;
sub.rn.f16x2 $0, $0, bias;
fma.rn.f16x2 $1, $1, sixteenth, offset;
sub.rn.f16x2 $2, $2, bias;
fma.rn.f16x2 $3, $3, sixteenth, offset;
}
""")


@triton.jit
def halves(words, LAYOUT: tl.constexpr, dtype: tl.constexpr):
    """The two parts of int16 words of an int8 or fp8 cache."""
    if _INTERPRETED or dtype != tl.float16:
        if LAYOUT == "int8":
            low = (words << 8 >> 8).to(dtype)
            high = (words >> 8).to(dtype)
        else:
            low = words.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(dtype)
            high = (words >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        low, high = tl.inline_asm_elementwise(
            _INT8 if LAYOUT == "int8" else _FP8,
            "=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low, high


@triton.jit
def quarters(words, dtype: tl.constexpr):
    """The four parts of int16 words of an int4 cache."""
    if _INTERPRETED or dtype != tl.float16:
        a = (words & 15).to(dtype)
        b = ((words >> 4) & 15).to(dtype)
        c = ((words >> 8) & 15).to(dtype)
        d = ((words >> 12) & 15).to(dtype)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _INT4,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return a, b, c, d
