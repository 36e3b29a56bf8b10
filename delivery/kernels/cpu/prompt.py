"""Attention of many rows in a CPU program: pieces of prompts and decodes in any mixture.

First every row is rotated and its key and value are kept (`store`), then blocks of queries of one
sequence meet blocks of keys with the online softmax of FlashAttention (arXiv 2205.14135). Blocks of keys
begin at fixed positions, so that a row's result does not depend on how its prompt was cut.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from delivery.kernels.cpu.attention import (
    BLOCK_SIZE,
    BLOCK_TABLE,
    FLOATS,
    GROUP,
    HEAD_DIM,
    K_CACHE,
    KV_HEADS,
    OUT,
    OUT_STRIDE,
    Q_STRIDE,
    SCRATCH,
    SCRATCH_BYTES,
    TABLE_STRIDE,
    V_CACHE,
    WINDOW,
    Q,
    copy,
    exp_below,
    highest,
    scale_into,
    store_row,
)
from delivery.kernels.cpu.ir import KERNEL, LANES, kernel, read_f32, read_i32, read_i64, write_f32
from delivery.kernels.cpu.tiles import FEATURES, ROWS, float_tile, transpose

# Slots beyond those of `attention`. WORK: int64 [blocks, 4]: first row, rows, position of the first row in
# its sequence, sequence. COUNT: rows of the step.
WORK, COUNT = 30, 31
STORED = 8
"""Rows of a piece of `store`."""
KEYS = 128
_QUERY_ROWS = 96
_NONE = np.float32(-3.0e38)


def queries(group: int) -> int:
    """Positions of one block of queries, each with a group of heads."""
    return max(1, _QUERY_ROWS // group)


def scratch_bytes(group: int, size: int) -> int:
    """Scratch of a thread: a block's queries, results and sums; a tile's scores; keys, values and zeros."""
    rows = -(-queries(group) * group // ROWS) * ROWS
    return 4 * (rows * (2 * size + 2) + ROWS * KEYS + 2 * KEYS * size + FEATURES)


@kernel(KERNEL)
def store(op: int, _thread: int, piece: int) -> None:
    """Some rows: rotated, keys and values kept."""
    for m in range(piece * STORED, min(read_i64(op + 8 * COUNT), (piece + 1) * STORED)):
        for head in range(read_i64(op + 8 * KV_HEADS)):
            store_row(op, m, head)


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def _fetch(op: int, sequence: int, head: int, base: int, count: int, keys: int, values: int) -> None:
    """Keys of `count` positions as panels [16][head_dim][16], values as rows [head_dim].

    Eight positions from a multiple of eight lie in one block of the cache, so that what is read beyond
    `count` is there, whatever it holds.
    """
    size, block_size = read_i64(op + 8 * HEAD_DIM), read_i64(op + 8 * BLOCK_SIZE)
    token_bytes = 4 * read_i64(op + 8 * KV_HEADS) * size
    table = read_i64(op + 8 * BLOCK_TABLE) + sequence * read_i64(op + 8 * TABLE_STRIDE)
    k_cache = read_i64(op + 8 * K_CACHE) + 4 * head * size
    v_cache = read_i64(op + 8 * V_CACHE) + 4 * head * size
    for first in range(0, count, 8):
        position = base + first
        block = int(read_i32(table + 4 * (position // block_size)))
        at = (block * block_size + position % block_size) * token_bytes
        panel = keys + 64 * size * (first // FEATURES) + 32 * (first // 8 % 2)
        transpose(k_cache + at, token_bytes, size // 8, panel)
        for i in range(first, min(count, first + 8)):
            copy(values + 4 * size * i, v_cache + at + (i - first) * token_bytes, size)


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def _weigh(line: int, low: int, high: int, vectors: int, cap: np.float32, state: int) -> np.float32:
    """Scores of one row as weights, those of low … high − 1 alone; what earlier results are worth now.

    state: the row's largest score so far and its sum of weights.
    """
    for i in range(low):
        write_f32(line + 4 * i, _NONE)
    for i in range(high, vectors * LANES):
        write_f32(line + 4 * i, _NONE)
    if cap > 0:
        for i in range(low, high):
            score = read_f32(line + 4 * i)
            write_f32(line + 4 * i, cap * np.float32(math.tanh(score / cap)))
    before = read_f32(state)
    peak = max(before, highest(line, vectors))
    weights = exp_below(line, peak, vectors)
    for i in range(low):
        write_f32(line + 4 * i, np.float32(0.0))
    for i in range(high, vectors * LANES):
        write_f32(line + 4 * i, np.float32(0.0))
    worth = np.float32(math.exp(before - peak))
    write_f32(state, peak)
    write_f32(state + 4, read_f32(state + 4) * worth + weights)
    return worth


@kernel(KERNEL)
def attend(op: int, thread: int, piece: int) -> None:
    """One key head of one block of queries."""
    kv_heads, group, size = (
        read_i64(op + 8 * KV_HEADS),
        read_i64(op + 8 * GROUP),
        read_i64(op + 8 * HEAD_DIM),
    )
    head, work = piece % kv_heads, read_i64(op + 8 * WORK) + 32 * (piece // kv_heads)
    first, count, position, sequence = (
        read_i64(work),
        read_i64(work + 8),
        read_i64(work + 16),
        read_i64(work + 24),
    )
    rows = count * group
    tiles = (rows + ROWS - 1) // ROWS
    floats, window = read_i64(op + 8 * FLOATS), read_i64(op + 8 * WINDOW)
    q = read_i64(op + 8 * SCRATCH) + thread * read_i64(op + 8 * SCRATCH_BYTES)
    out = q + 4 * size * ROWS * tiles
    scores = out + 4 * size * ROWS * tiles
    states = scores + 4 * KEYS * ROWS
    keys = states + 8 * ROWS * tiles
    values = keys + 4 * KEYS * size
    zeros = values + 4 * KEYS * size
    for i in range(FEATURES):
        write_f32(zeros + 4 * i, np.float32(0.0))
    for r in range(ROWS * tiles):
        m, h = first + min(r, rows - 1) // group, head * group + min(r, rows - 1) % group
        row = read_i64(op + 8 * Q) + m * read_i64(op + 8 * Q_STRIDE) + 4 * h * size
        scale_into(q + 4 * size * r, row, read_f32(floats), size)
        for i in range(size):
            write_f32(out + 4 * (size * r + i), np.float32(0.0))
        write_f32(states + 8 * r, _NONE)
        write_f32(states + 8 * r + 4, np.float32(0.0))
    begin = max(0, position - window + 1) if window > 0 else 0
    for base in range(begin // KEYS * KEYS, position + count, KEYS):
        there = min(KEYS, position + count - base)
        _fetch(op, sequence, head, base, there, keys, values)
        for tile in range(tiles):
            # Padding rows are the last row again.
            seen = min(there, position + min(ROWS * tile + ROWS - 1, rows - 1) // group + 1 - base)
            if seen <= 0:
                continue
            vectors = (seen + LANES - 1) // LANES
            x, to = q + 4 * size * ROWS * tile, out + 4 * size * ROWS * tile
            for panel in range(vectors):
                at, line = keys + 4 * FEATURES * size * panel, scores + 4 * FEATURES * panel
                float_tile(x, 4 * size, at, 4 * FEATURES, size, zeros, 0, line, 4 * KEYS)
            for m in range(ROWS):
                r = ROWS * tile + m
                own = position + min(r, rows - 1) // group - base
                low = max(0, own - window + 1) if window > 0 else 0
                high = min(seen, own + 1)
                line = scores + 4 * KEYS * m
                if high <= low:
                    for i in range(vectors * LANES):
                        write_f32(line + 4 * i, np.float32(0.0))
                    continue
                worth = _weigh(line, low, high, vectors, read_f32(floats + 4), states + 8 * r)
                if worth != np.float32(1.0):
                    scale_into(to + 4 * size * m, to + 4 * size * m, worth, size)
            for part in range(size // FEATURES):
                at, column = values + 4 * FEATURES * part, to + 4 * FEATURES * part
                float_tile(scores, 4 * KEYS, at, 4 * size, seen, column, 4 * size, column, 4 * size)
    for r in range(rows):
        m, h = first + r // group, head * group + r % group
        to = read_i64(op + 8 * OUT) + m * read_i64(op + 8 * OUT_STRIDE) + 4 * h * size
        scale_into(to, out + 4 * size * r, np.float32(1.0) / read_f32(states + 8 * r + 4), size)
