"""What the attention programs share: reading tiles of the paged cache, scores, the online softmax.

Scores live in base 2: exp2 is one instruction. A tile of int4 holds two halves of a head (see
`kv_layout`), so every tile function returns a low part and a high part; the others ignore the high one.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)
"""Start of the running maximum: finite, so that a row which sees nothing gives 0 and not NaN."""


@triton.jit
def block_of(table, first, rows, length, PAGE: tl.constexpr, TILE: tl.constexpr):
    """The block of positions first + rows, 0 past the end: a scalar for a tile that fits into a page.

    Loops look it up one tile ahead: a lookup in front of its own tile's loads would take half of the
    pipeline's stages.
    """
    if TILE <= PAGE:
        block = tl.load(table + first // PAGE, mask=first < length, other=0)
    else:
        position = first + rows
        block = tl.load(table + position // PAGE, mask=position < length, other=0)
    return block


@triton.jit
def offset_of(first, rows, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Where positions first + rows lie in their blocks."""
    if TILE <= PAGE:
        offset = first % PAGE + rows
    else:
        offset = (first + rows) % PAGE
    return offset


@triton.jit
def load_tile(
    cache,
    block,
    offset,
    columns,
    keep,
    block_stride,
    head,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    STORED_DIM: tl.constexpr,
    EXACT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stored values [TILE, columns] of one head. MASKED: rows not in `keep` are 0, whatever memory holds."""
    row = block.to(tl.int64) * block_stride + offset * TOKEN_STRIDE + head * HEAD_STRIDE
    address = cache + row[:, None] + columns[None, :]
    if MASKED and EXACT:
        tile = tl.load(address, mask=keep[:, None], other=0.0)
    elif MASKED:
        tile = tl.load(address, mask=keep[:, None] & (columns < STORED_DIM)[None, :], other=0.0)
    elif EXACT:
        tile = tl.load(address)
    else:
        tile = tl.load(address, mask=(columns < STORED_DIM)[None, :], other=0.0)
    return tile


@triton.jit
def load_scale(
    scales, block, offset, keep, scale_stride, head, part, PARTS: tl.constexpr, PAGE: tl.constexpr
):
    """float32 [TILE]; 0 for rows not in `keep`."""
    address = scales + block.to(tl.int64) * scale_stride + (head * PARTS + part) * PAGE + offset
    return tl.load(address, mask=keep, other=0.0)


@triton.jit
def nibbles(packed, dtype: tl.constexpr):
    """(low, high) nibbles of bytes, as floats; 0 .. 15 are exact in every float format."""
    return (packed & 15).to(dtype), (packed >> 4).to(dtype)


@triton.jit
def capped(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Soft-capped scores still to be multiplied by `base2_factor`. tanh x = 1 − 2 / (e^2x + 1)."""
    if SOFTCAP:
        scores = 1.0 - 2.0 / (tl.exp2(scores * (scale / softcap * (2.0 * LOG2E))) + 1.0)
    return scores


@triton.jit
def base2_factor(scale, softcap, SOFTCAP: tl.constexpr):
    """What turns scores into exponents of 2. Multiplied in where the maximum is taken off: one operation."""
    factor = scale * LOG2E
    if SOFTCAP:
        factor = softcap * LOG2E
    return factor
