"""Chunked prefill over the paged cache: several queries a sequence, causal, any number of sequences.

A program takes BLOCK_M rows of one kv head: BLOCK_M // GROUP neighbouring queries with all query heads of
their group, so that a tile of keys serves the whole group. Tiles of a step are numbered without host
knowledge: sequence b owns the numbers from query_start[b] // QUERIES + b on, which leaves a few numbers
unused. The last queries of a sequence have most to do and start first.

Operations: 4 · head_dim for each visible (query head, key) pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from delivery.kernels.gpu.decode_config import sequence_lanes
from delivery.kernels.gpu.overlap import gdc_launch_dependents, gdc_wait, overlaps
from delivery.kernels.gpu.pages import LOWEST
from delivery.kernels.gpu.prefill_tiles import attend_span
from delivery.kernels.hopper_rules import why_not_hopper
from delivery.kernels.kv_layout import layout_of
from delivery.kernels.targets import has_bulk_copies, shared_memory


@triton.jit(do_not_specialize=["table_stride", "num_decodes", "num_sequences"])
def _prefill(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    block_table,
    query_start,
    context_lens,
    out,
    q_stride,
    out_stride,
    table_stride,
    k_stride,
    v_stride,
    scale_stride,
    scale,
    softcap,
    num_decodes,
    num_sequences,
    GROUP: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STORED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    LAYOUT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHOOSE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    head = tl.program_id(0)
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    # Sequences of this call are num_decodes .. num_sequences − 1, their rows begin at num_decodes.
    sequence = tl.arange(0, SEQUENCES)
    owned = num_decodes + sequence < num_sequences
    starts = tl.load(query_start + num_decodes + sequence, mask=owned, other=0) - num_decodes
    before = tl.sum((owned & (starts // QUERIES + sequence <= number)).to(tl.int32), 0) - 1
    b = num_decodes + before
    start = tl.load(query_start + b)
    queries = tl.load(query_start + b + 1) - start
    local = (number - ((start - num_decodes) // QUERIES + before)) * QUERIES
    if OVERLAP:
        gdc_wait()
    if CHOOSE:
        queries = tl.where(queries == 1, 0, queries)
    if local >= queries:
        return
    length = tl.load(context_lens + b)
    row = tl.arange(0, BLOCK_M)
    index = local + row // GROUP
    valid = (index < queries) & (row < QUERIES * GROUP)
    query_position = length - queries + index
    column = tl.arange(0, WIDTH)
    inside = valid[:, None] & (column < STORED_DIM)[None, :]
    at = (start + index).to(tl.int64)[:, None]
    within = (head * GROUP + row % GROUP)[:, None] * HEAD_DIM + column[None, :]
    query = tl.load(q + at * q_stride + within, mask=inside, other=0.0)
    query_high = query
    query_sum = 0.0
    if LAYOUT == "int4":
        query_high = tl.load(q + at * q_stride + within + STORED_DIM, mask=inside, other=0.0)
        query_sum = tl.sum(query.to(tl.float32), 1) + tl.sum(query_high.to(tl.float32), 1)
    table = block_table + b.to(tl.int64) * table_stride

    lowest_seen = length - queries + local  # position of the first query of this tile
    end = tl.minimum(lowest_seen + QUERIES, length)
    begin = 0
    full_end = tl.maximum(lowest_seen + 1, 0) // TILE * TILE
    if WINDOW > 0:
        begin = tl.maximum(lowest_seen - WINDOW + 1, 0) // TILE * TILE
        full_end = begin  # nearly every tile of a window is cut by one of its two edges
    sums = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    sums_high = tl.zeros((BLOCK_M, WIDTH if LAYOUT == "int4" else 1), tl.float32)
    extra = tl.zeros((BLOCK_M,), tl.float32)
    most = tl.full((BLOCK_M,), LOWEST, tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    # Keys that all rows see; the diagonal; and the last tile where a stale value must not be read.
    whole_end = tl.maximum(full_end, tl.minimum(tl.cdiv(end, TILE), length // TILE) * TILE)
    for span in tl.static_range(3):
        sums, sums_high, extra, most, weight = attend_span(
            query,
            query_high,
            query_sum,
            sums,
            sums_high,
            extra,
            most,
            weight,
            k_cache,
            v_cache,
            k_scale,
            v_scale,
            table,
            length,
            query_position,
            head,
            begin if span == 0 else full_end if span == 1 else whole_end,
            full_end if span == 0 else tl.minimum(whole_end, end) if span == 1 else end,
            k_stride,
            v_stride,
            scale_stride,
            scale,
            softcap,
            TOKEN_STRIDE,
            HEAD_STRIDE,
            STORED_DIM,
            WIDTH,
            PAGE,
            TILE,
            LAYOUT,
            WINDOW,
            SOFTCAP,
            span > 0,
            span == 2,
            TMA,
            STAGES,
            PRECISION,
        )
    share = 1.0 / tl.maximum(weight, 1e-30)[:, None]
    result = out + at * out_stride + within
    tl.store(result, ((sums + extra[:, None]) * share).to(out.dtype.element_ty), mask=inside)
    if LAYOUT == "int4":
        high = (sums_high + extra[:, None]) * share
        tl.store(result + STORED_DIM, high.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """block_m: rows (queries times their group); tile: keys a step; tma: the bulk copy engine loads tiles."""

    block_m: int
    tile: int
    stages: int
    warps: int
    tma: bool = False


def prefill_config(
    layout: str, head_dim: int, page: int, bulk_copies: bool, shared_bytes: int
) -> PrefillConfig:
    """What measured best on an H200; see docs/performance/attention.md."""
    if head_dim > 128:
        return PrefillConfig(64, 32, 2, 4)
    if shared_bytes < 160 << 10:
        return PrefillConfig(64, 32, 2, 4)
    if layout == "auto" and page >= 64 and bulk_copies:
        return PrefillConfig(64, 64, 3, 4, tma=True)
    return PrefillConfig(128, 64, 3, 8) if layout == "auto" else PrefillConfig(64, 64, 2, 4)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    num_decodes: int,
    config: PrefillConfig | None = None,
    *,
    choose: bool = False,
) -> None:
    """Attention of the sequences from number num_decodes on; rows num_decodes and up of out are written.

    choose: sequences with a single query are left out. Where nothing is asked for by `config`, a Hopper card
    takes the kernel of prefill_hopper.py.
    """
    tokens, heads, head_dim = q.shape
    page, kv_heads, stored_dim = k_cache.shape[1:]
    layout = layout_of(k_cache).name
    whole = k_cache.is_contiguous() and v_cache.is_contiguous() and has_bulk_copies(q.device)
    if config is None and why_not_hopper(q[:, 0]) is None:
        from delivery.kernels.gpu import prefill_hopper

        sequences = block_table.shape[0] - num_decodes
        if not prefill_hopper.why_not(q, k_cache, v_cache, sequences, sliding_window, softcap):
            where = (block_table, query_start, context_lens, out, scale, k_scale, v_scale, num_decodes)
            prefill_hopper.prefill(q, k_cache, v_cache, *where, choose=choose)
            return
    config = config or prefill_config(layout, head_dim, page, whole, shared_memory(q.device)[0])
    group = heads // kv_heads
    block_m = max(config.block_m, triton.next_power_of_2(group))
    queries = block_m // group
    sequences = block_table.shape[0] - num_decodes
    width = max(16, triton.next_power_of_2(stored_dim))
    tma = config.tma and whole and config.tile <= page and width == stored_dim and layout == "auto"
    overlap = overlaps(q.device)
    grid = (kv_heads, (tokens - num_decodes) // queries + sequences)
    _prefill[grid](
        q,
        _described(k_cache, config.tile) if tma else k_cache,
        _described(v_cache, config.tile) if tma else v_cache,
        k_scale,
        v_scale,
        block_table,
        query_start,
        context_lens,
        out,
        q.stride(0),
        out.stride(0),
        block_table.stride(0),
        k_cache.stride(0),
        v_cache.stride(0),
        0 if k_scale is None else k_scale.stride(0),
        scale,
        softcap or 0.0,
        num_decodes,
        block_table.shape[0],
        GROUP=group,
        TOKEN_STRIDE=k_cache.stride(1),
        HEAD_STRIDE=k_cache.stride(2),
        HEAD_DIM=head_dim,
        STORED_DIM=stored_dim,
        BLOCK_M=block_m,
        QUERIES=queries,
        WIDTH=width,
        PAGE=page,
        TILE=config.tile,
        SEQUENCES=sequence_lanes(sequences),
        LAYOUT=layout,
        WINDOW=sliding_window or 0,
        SOFTCAP=softcap is not None,
        TMA=tma,
        STAGES=config.stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        CHOOSE=choose,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=config.warps,
    )


def _described(cache: torch.Tensor, tile: int) -> Any:
    """The cache as lines of tokens, read `tile` lines of one head at a time by the bulk copy engine."""
    lines = cache.view(cache.shape[0] * cache.shape[1], cache.shape[2] * cache.shape[3])
    return TensorDescriptor.from_tensor(lines, [tile, cache.shape[3]])
