"""4-bit words to tensor-core operands in registers: no movement between threads, packed 16-bit arithmetic.

Two values of 16 bits ride in one register. A nibble is taken by one `lop3` into the mantissa of a float of
known exponent (bf16 128 + q, fp16 1024 + q or 1024 + 16 q), from which a packed subtraction or fused
multiply-add takes bias and zero point exactly (Kim et al. 2022, arXiv:2211.10017, give the fp16 form).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_TAKE_BF16 = """
{
.reg .b32 t<6>;
shr.b32 t0, $8, 4;
shr.b32 t1, $8, 8;
shr.b32 t2, $8, 12;
shr.b32 t3, $9, 4;
shr.b32 t4, $9, 8;
shr.b32 t5, $9, 12;
lop3.b32 $0, $8, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $1, t0, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $2, t1, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $3, t2, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $4, $9, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $5, t3, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $6, t4, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $7, t5, 0x000f000f, 0x43004300, 0xea;
sub.rn.bf16x2 $0, $0, $10;
sub.rn.bf16x2 $1, $1, $12;
sub.rn.bf16x2 $2, $2, $10;
sub.rn.bf16x2 $3, $3, $12;
sub.rn.bf16x2 $4, $4, $10;
sub.rn.bf16x2 $5, $5, $12;
sub.rn.bf16x2 $6, $6, $10;
sub.rn.bf16x2 $7, $7, $12;
"""
_TAKE_FP16 = """
{
.reg .b32 t<3>;
shr.b32 t0, $8, 8;
shr.b32 t1, $9, 8;
mov.b32 t2, 0x2c002c00;
lop3.b32 $0, $8, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $1, $8, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 $2, t0, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $3, t0, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 $4, $9, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $5, $9, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 $6, t1, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $7, t1, 0x00f000f0, 0x64006400, 0xea;
sub.rn.f16x2 $0, $0, $10;
fma.rn.f16x2 $1, $1, t2, $12;
sub.rn.f16x2 $2, $2, $10;
fma.rn.f16x2 $3, $3, t2, $12;
sub.rn.f16x2 $4, $4, $10;
fma.rn.f16x2 $5, $5, t2, $12;
sub.rn.f16x2 $6, $6, $10;
fma.rn.f16x2 $7, $7, t2, $12;
"""


def _scaling(kind: str) -> str:
    return "".join(f"mul.rn.{kind}x2 ${i}, ${i}, ${16 if i % 2 else 14};\n" for i in range(8))


_OUT = ",".join(["=&r"] * 8)
_IN = gl.constexpr(f"{_OUT},r,r,r,r,r,r")
_IN_SCALED = gl.constexpr(f"{_OUT},r,r,r,r,r,r,r,r,r,r")
_BF16 = gl.constexpr(_TAKE_BF16 + "}")
_FP16 = gl.constexpr(_TAKE_FP16 + "}")
_BF16_SCALED = gl.constexpr(_TAKE_BF16 + _scaling("bf16") + "}")
_FP16_SCALED = gl.constexpr(_TAKE_FP16 + _scaling("f16") + "}")


@gluon.constexpr_function
def words_layout(block_n, warps):
    """Layout of words [block_n / 2, 32] as shared memory hands them out: 16 bytes a thread and access."""
    upper = [[1 << bit, 0] for bit in range(3, (block_n // 2).bit_length() - 1)]
    across = warps.bit_length() - 1
    lanes = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
    registers = [[0, 1], [0, 2], [4, 0], *upper[across:]]
    return gl.DistributedLinearLayout(registers, lanes, upper[:across], [], [block_n // 2, 32])


@gluon.constexpr_function
def flat_layout(block_n, warps, columns):
    """The same registers seen as [block_n / 2 output features without n3, columns (k6, k2 k1, k5, k4)]."""
    upper = [[1 << bit, 0] for bit in range(3, (block_n // 2).bit_length() - 1)]
    across = warps.bit_length() - 1
    if columns == 8:
        inner, lanes = [[0, 1]], [[0, 2], [0, 4]]
    else:
        inner, lanes = [[0, 1], [0, 2]], [[0, 4], [0, 8]]
    if columns == 32:
        inner = [*inner, [0, 16]]
    return gl.DistributedLinearLayout(
        [*inner, *upper[across:]],
        [*lanes, [1, 0], [2, 0], [4, 0]],
        upper[:across],
        [],
        [block_n // 2, columns],
    )


@gluon.jit
def words_of(shared, BLOCK_N: gl.constexpr, WARPS: gl.constexpr):
    """The words of one step [BLOCK_N / 2, 32] as [BLOCK_N / 2, (k6, k2 k1, k5, k4)]."""
    ROWS: gl.constexpr = BLOCK_N // 2
    words = shared.load(words_layout(BLOCK_N, WARPS))
    words = words.reshape([ROWS // 8, 2, 4, 2, 4, 4]).permute([0, 2, 3, 1, 4, 5]).reshape([ROWS, 32])
    return gl.convert_layout(words, flat_layout(BLOCK_N, WARPS, 32), assert_trivial=True)


@gluon.jit
def chunk_of(words, INDEX: gl.constexpr, CHUNKS: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr):
    """Input features INDEX · 128 / CHUNKS and after, of a step's words."""
    ROWS: gl.constexpr = BLOCK_N // 2
    if CHUNKS >= 2:
        low, high = gl.split(words.reshape([ROWS, 2, 16]).permute([0, 2, 1]))
        words = low if INDEX < CHUNKS // 2 else high
    if CHUNKS == 4:
        low, high = gl.split(words.reshape([ROWS, 4, 2, 2]).permute([0, 1, 3, 2]))
        words = (low if INDEX % 2 == 0 else high).reshape([ROWS, 8])
    return gl.convert_layout(words, flat_layout(BLOCK_N, WARPS, 32 // CHUNKS), assert_trivial=True)


@gluon.jit
def halves_of(rows, like, BLOCK_N: gl.constexpr, WARPS: gl.constexpr, COLUMNS: gl.constexpr):
    """One value per output feature [BLOCK_N] as two tensors shaped like `like`, for n3 = 0 and n3 = 1."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, flat_layout(BLOCK_N, WARPS, COLUMNS))
    ROWS: gl.constexpr = BLOCK_N // 2
    low, high = gl.split(rows.reshape([ROWS // 8, 2, 8]).permute([0, 2, 1]))
    low = gl.convert_layout(low.reshape([ROWS]), LAYOUT, assert_trivial=True)
    high = gl.convert_layout(high.reshape([ROWS]), LAYOUT, assert_trivial=True)
    low, _ = gl.broadcast(low.expand_dims(1), like)
    high, _ = gl.broadcast(high.expand_dims(1), like)
    return low, high


@gluon.jit
def fragment(
    words,
    zero_point,
    scale,
    CHUNKS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
    SCALED: gl.constexpr,
    DTYPE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """A chunk's words as operand A [BLOCK_N, 128 / CHUNKS] of DTYPE: q − zero, times scale if SCALED.

    zero_point int32 [BLOCK_N]; scale of DTYPE [BLOCK_N], unused unless SCALED.
    """
    COLUMNS: gl.constexpr = 32 // CHUNKS
    if DTYPE == gl.bfloat16:
        z0, z1 = halves_of(zero_point * 0x00010001 + 0x43004300, words, BLOCK_N, WARPS, COLUMNS)
    else:
        z0, _ = halves_of(zero_point * 0x00010001 + 0x64006400, words, BLOCK_N, WARPS, COLUMNS)
        # −(64 + z) in fp16: 64 is 0x5400, a unit is 16 steps of its mantissa.
        _, z1 = halves_of(zero_point * 0x00100010 - 0x2BFF2C00, words, BLOCK_N, WARPS, COLUMNS)
    if SCALED:
        doubled = scale.to(gl.uint16, bitcast=True).to(gl.int32) * 0x00010001
        s0, s1 = halves_of(doubled, words, BLOCK_N, WARPS, COLUMNS)
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            _BF16_SCALED if DTYPE == gl.bfloat16 else _FP16_SCALED,
            _IN_SCALED,
            [words, z0, z1, s0, s1],
            dtype=(gl.bfloat16,) * 8 if DTYPE == gl.bfloat16 else (gl.float16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            _BF16 if DTYPE == gl.bfloat16 else _FP16,
            _IN,
            [words, z0, z1],
            dtype=(gl.bfloat16,) * 8 if DTYPE == gl.bfloat16 else (gl.float16,) * 8,
            is_pure=True,
            pack=2,
        )
    # Output j has n3 = j0, k3 = j1, k4 = j2; the word's own place in its pair turns from k4 into k0.
    a = gl.join(gl.join(gl.join(o0, o1), gl.join(o2, o3)), gl.join(gl.join(o4, o5), gl.join(o6, o7)))
    K6: gl.constexpr = 2 if CHUNKS == 1 else 1
    K5: gl.constexpr = 1 if CHUNKS == 4 else 2
    a = a.reshape([BLOCK_N // 16, 8, K6, 4, K5, 2, 2, 2, 2]).permute([0, 6, 1, 2, 4, 8, 7, 3, 5])
    return gl.convert_layout(a.reshape([BLOCK_N, 128 // CHUNKS]), LAYOUT, assert_trivial=True)
