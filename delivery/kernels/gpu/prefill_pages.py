"""The producer of prefill_hopper.py for quantised pages: they go to the rings as fp16."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from delivery.kernels.gpu.prefill_order import announce, next_number, steps_of, tile_at
from delivery.kernels.gpu.prefill_producer import RENAMED

_INT8 = gl.constexpr("""
{
.reg .b32 u, bias, part, offset;
xor.b32 u, $2, 0x80808080;
mov.b32 bias, 0x64646464;
mov.b32 part, 0x24002400;
mov.b32 offset, 0xcc80cc80;
prmt.b32 $0, u, bias, 0x4140;
prmt.b32 $1, u, bias, 0x4342;
fma.rn.f16x2 $0, $0, part, offset;
fma.rn.f16x2 $1, $1, part, offset;
mul.rn.f16x2 $0, $0, $3;
mul.rn.f16x2 $1, $1, $3;
}
""")
_FP8 = gl.constexpr("""
{
.reg .b16 a, b;
.reg .b32 part;
mov.b32 {a, b}, $2;
mov.b32 part, 0x24002400;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
mul.rn.f16x2 $0, $0, part;
mul.rn.f16x2 $1, $1, part;
mul.rn.f16x2 $0, $0, $3;
mul.rn.f16x2 $1, $1, $3;
}
""")
_INT4 = gl.constexpr("""
{
.reg .b32 low, high, bias, part, offset;
shr.u32 high, $4, 4;
mov.b32 bias, 0x64646464;
mov.b32 part, 0x24002400;
mov.b32 offset, 0xcc00cc00;
and.b32 low, $4, 0x0f0f0f0f;
and.b32 high, high, 0x0f0f0f0f;
prmt.b32 $0, low, bias, 0x4140;
prmt.b32 $1, low, bias, 0x4342;
prmt.b32 $2, high, bias, 0x4140;
prmt.b32 $3, high, bias, 0x4342;
fma.rn.f16x2 $0, $0, part, offset;
fma.rn.f16x2 $1, $1, part, offset;
fma.rn.f16x2 $2, $2, part, offset;
fma.rn.f16x2 $3, $3, part, offset;
fma.rn.f16x2 $0, $0, $5, $6;
fma.rn.f16x2 $1, $1, $5, $6;
fma.rn.f16x2 $2, $2, $5, $6;
fma.rn.f16x2 $3, $3, $5, $6;
}
""")
"""A word of four bytes to pairs of fp16: 1024 + u by a byte permutation, then exactly u / 64, then times 64
scales. The factor keeps small scales out of fp16's denormal numbers."""


@gluon.jit
def _twice(x):
    """float32 → the same value as fp16 in both halves of a word."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _read(
    cache,
    scales,
    table,
    first,
    length,
    head,
    block_stride,
    scale_stride,
    TOKEN_STRIDE: gl.constexpr,
    HEAD_STRIDE: gl.constexpr,
    WORDS: gl.constexpr,
    TOKENS: gl.constexpr,
    PAGE: gl.constexpr,
    PARTS: gl.constexpr,
    L: gl.constexpr,
):
    """(words [TOKENS, WORDS], scale [TOKENS], least value [TOKENS]); 0 behind the sequence's end."""
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, L))
    there = first + token < length
    if PAGE >= TOKENS:
        block = gl.load(table + first // PAGE, mask=first < length, other=0).to(gl.int64)
        offset = first % PAGE + token
    else:
        block = gl.load(table + (first + token) // PAGE, mask=there, other=0).to(gl.int64)
        offset = (first + token) % PAGE
    at = block * block_stride + head * HEAD_STRIDE + offset * TOKEN_STRIDE
    column = gl.arange(0, WORDS, gl.SliceLayout(0, L)).expand_dims(0)
    words = gl.load(cache + (at.expand_dims(1) + column), mask=there.expand_dims(1), other=0)
    scale_at = block * scale_stride + head * (PARTS * PAGE) + offset
    scale = gl.load(scales + scale_at, mask=there, other=0.0)
    least = scale
    if PARTS == 2:
        least = gl.load(scales + (scale_at + PAGE), mask=there, other=0.0)
    return words, scale, least


@gluon.jit
def _write(step, page, words, scale, least, LAYOUT: gl.constexpr):
    """Words of a quantised page as fp16 to half `page` of a ring's step [2 · TOKENS, HEAD_DIM]."""
    TOKENS: gl.constexpr = step.shape[0] // 2
    WORDS: gl.constexpr = words.shape[1]
    LINES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    if RENAMED:
        view = step.reinterpret(gl.int32, [2 * TOKENS, step.shape[1] // 2], LINES).slice(
            page * TOKENS, TOKENS
        )
    else:
        view = step._reinterpret(gl.int32, [2 * TOKENS, step.shape[1] // 2], LINES).slice(
            page * TOKENS, TOKENS
        )
    factor = _twice(scale * 64.0).expand_dims(1)
    factor, words = gl.broadcast(factor, words)
    if LAYOUT == 4:
        bottom, words = gl.broadcast(_twice(least).expand_dims(1), words)
        a, b, c, d = gl.inline_asm_elementwise(
            _INT4, "=&r,=&r,=&r,=&r,r,r,r", [words, factor, bottom],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        view.slice(0, 2 * WORDS, 1).store(gl.join(a, b).reshape([TOKENS, 2 * WORDS]))
        view.slice(2 * WORDS, 2 * WORDS, 1).store(gl.join(c, d).reshape([TOKENS, 2 * WORDS]))
    else:
        a, b = gl.inline_asm_elementwise(
            _INT8 if LAYOUT == 8 else _FP8, "=&r,=&r,r,r", [words, factor],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        view.store(gl.join(a, b).reshape([TOKENS, 2 * WORDS]))


@gluon.jit
def convert_pages(
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    rings,
    barriers,
    notes,
    block_table,
    table_stride,
    block_stride,
    scale_stride,
    where,
    TOKEN_STRIDE: gl.constexpr,
    HEAD_STRIDE: gl.constexpr,
    LAYOUT: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE: gl.constexpr,
    QUERIES: gl.constexpr,
    SEQUENCES: gl.constexpr,
    CHOOSE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A warp group: chooses tiles, reads quantised pages a step ahead, writes them to the rings as fp16."""
    k_ring, v_ring = rings
    k_ready, k_free, v_ready, v_free, _q_ready, _q_free, _turns = barriers
    TOKENS: gl.constexpr = k_ring.shape[1] // 2
    WORDS: gl.constexpr = HEAD_DIM // 8 if LAYOUT == 4 else HEAD_DIM // 4
    PARTS: gl.constexpr = 2 if LAYOUT == 4 else 1
    L: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WORDS, WORDS // 4], [gl.num_warps(), 1], [1, 0])
    stage = 0
    phase = 0
    announcements = 0
    tile = gl.program_id(0)
    while tile < where[4]:
        b, head, start, queries, length, local = tile_at(tile, where, KV_HEADS, QUERIES, SEQUENCES, CHOOSE)
        if local < queries:
            table = block_table + b.to(gl.int64) * table_stride
            steps = steps_of(length, queries, local, QUERIES, 2 * TOKENS)
            announce(
                notes, announcements, start + local, queries - local, length - queries + local, head, steps
            )
            announcements += 1
            first = (steps - 1) * (2 * TOKENS)
            w0, s0, m0 = _read(
                k_cache, k_scale, table, first, length, head, block_stride, scale_stride,
                TOKEN_STRIDE, HEAD_STRIDE, WORDS, TOKENS, PAGE, PARTS, L,
            )  # fmt: skip
            w1, s1, m1 = _read(
                k_cache, k_scale, table, first + TOKENS, length, head, block_stride, scale_stride,
                TOKEN_STRIDE, HEAD_STRIDE, WORDS, TOKENS, PAGE, PARTS, L,
            )  # fmt: skip
            for _step in range(steps):
                mbarrier.wait(k_free.index(stage), phase ^ 1)
                _write(k_ring.index(stage), 0, w0, s0, m0, LAYOUT)
                w0, s0, m0 = _read(
                    v_cache, v_scale, table, first, length, head, block_stride, scale_stride,
                    TOKEN_STRIDE, HEAD_STRIDE, WORDS, TOKENS, PAGE, PARTS, L,
                )  # fmt: skip
                _write(k_ring.index(stage), 1, w1, s1, m1, LAYOUT)
                w1, s1, m1 = _read(
                    v_cache, v_scale, table, first + TOKENS, length, head, block_stride, scale_stride,
                    TOKEN_STRIDE, HEAD_STRIDE, WORDS, TOKENS, PAGE, PARTS, L,
                )  # fmt: skip
                fence_async_shared()
                mbarrier.arrive(k_ready.index(stage), count=1)
                first = gl.maximum(first - 2 * TOKENS, 0)
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                _write(v_ring.index(stage), 0, w0, s0, m0, LAYOUT)
                w0, s0, m0 = _read(
                    k_cache, k_scale, table, first, length, head, block_stride, scale_stride,
                    TOKEN_STRIDE, HEAD_STRIDE, WORDS, TOKENS, PAGE, PARTS, L,
                )  # fmt: skip
                _write(v_ring.index(stage), 1, w1, s1, m1, LAYOUT)
                w1, s1, m1 = _read(
                    k_cache, k_scale, table, first + TOKENS, length, head, block_stride, scale_stride,
                    TOKEN_STRIDE, HEAD_STRIDE, WORDS, TOKENS, PAGE, PARTS, L,
                )  # fmt: skip
                fence_async_shared()
                mbarrier.arrive(v_ready.index(stage), count=1)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
        tile = next_number(where)
    announce(notes, announcements, 0, 0, 0, 0, 0)
