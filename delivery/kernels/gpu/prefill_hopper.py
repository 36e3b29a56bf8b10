"""Chunked prefill on Hopper: one producer and two consumer warp groups, products and softmax side by side.

A tile is 128 rows of one kv head, 128 // GROUP neighbouring queries with all query heads of their group;
each consumer has 64 of them. Keys and values arrive in steps of 128 tokens (two pages of 64) in rings that
both consumers read. A consumer starts the scores of a step, then the sums of the step before, and they take
turns in starting: one has its softmax while the other multiplies (FlashAttention-3, arXiv 2407.08608).

Steps run from the diagonal to the first token: what has to be masked comes first. Pages of the model's own
dtype are copied by one warp (prefill_producer.py); quantised ones are converted by a warp group
(prefill_pages.py), once for both consumers.

Operations: 4 · head_dim for each visible (query head, key) pair.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from delivery.kernels.gpu.arrivals import arrival_counters
from delivery.kernels.gpu.decode_config import sequence_lanes
from delivery.kernels.gpu.hopper import gdc_wait, rows_descriptor
from delivery.kernels.gpu.overlap import overlaps
from delivery.kernels.gpu.prefill_consumer import consume_converted, consume_copied
from delivery.kernels.gpu.prefill_order import FIELDS, SLOTS
from delivery.kernels.gpu.prefill_pages import convert_pages
from delivery.kernels.gpu.prefill_producer import COLUMNS, copy_pages, load_queries
from delivery.kernels.gpu.prefill_step import ROWS, STEP, TOKENS
from delivery.kernels.kv_layout import layout_of
from delivery.kernels.targets import multiprocessors

CONSUMER = gl.constexpr(200)
PRODUCER = gl.constexpr(104)
"""Registers a thread where the producer is a whole warp group that converts."""
LOG2E = 1.4426950408889634
MAX_SEQUENCES = 128
"""Sequences whose first rows fit into the producer's registers. More would be kept in memory, and values that
the assembler keeps there have been found wrong in kernels of this form."""
SPILL_FREE = tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 6)
"""Whether the kernel that converts has its values in registers alone. In triton 3.9 a few are spilled."""
SMALLEST_CONVERTED = 32
"""Tokens of a quantised page. Pages of 16 have so many addresses that the assembler spills."""
FORMS = {"auto": 16, "int8": 8, "fp8": -8, "int4": 4}
"""LAYOUT in the kernels: bits of a value, −8 for fp8."""


@gluon.jit(
    do_not_specialize=["first_row", "sequences", "table_stride", "tiles", "programs"],
    do_not_specialize_on_alignment=["query_start", "context_lens", "block_table"],
)
def _kernel(
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
    block_stride,
    scale_stride,
    factor,
    first_row,
    sequences,
    tiles,
    programs,
    counter,
    TOKEN_STRIDE: gl.constexpr,
    HEAD_STRIDE: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE: gl.constexpr,
    QUERIES: gl.constexpr,
    SEQUENCES: gl.constexpr,
    LAYOUT: gl.constexpr,
    CHOOSE: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    # Quantised pages become fp16, which holds their values and their scales more exactly than bf16.
    dtype: gl.constexpr = q.dtype.element_ty if LAYOUT == 16 else gl.float16
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], SHARED)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, STEP, HEAD_DIM], SHARED)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, STEP, HEAD_DIM], SHARED)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
        mbarrier.init(turns.index(i), count=1)
    COPIED: gl.constexpr = LAYOUT == 16
    for i in gl.static_range(SLOTS):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(heard.index(i), count=4 if COPIED else 2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    rings = (k_ring, v_ring)
    barriers = (k_ready, k_free, v_ready, v_free, q_ready, q_free, turns)
    notes = (slots, told, heard)
    where = (query_start, context_lens, first_row, sequences, tiles, programs, counter)
    # Argument tuples stand in the calls: by an assignment their constants would become values.
    if COPIED:
        gl.warp_specialize(
            [
                (
                    consume_copied,
                    (
                        out, q_tiles.index(0), rings, barriers, notes, out_stride, factor, 0,
                        GROUP, HEAD_DIM, QUERIES, STAGES,
                    ),
                ),
                (
                    consume_copied,
                    (
                        out, q_tiles.index(1), rings, barriers, notes, out_stride, factor, 1,
                        GROUP, HEAD_DIM, QUERIES, STAGES,
                    ),
                ),
                (
                    copy_pages,
                    (
                        k_cache, v_cache, rings, barriers, notes, block_table, table_stride, where,
                        KV_HEADS, HEAD_DIM, PAGE, QUERIES, SEQUENCES, CHOOSE, STAGES,
                    ),
                ),
                (
                    load_queries,
                    (
                        q, q_tiles.index(0), q_ready.index(0), q_free.index(0), notes, q_stride, 0,
                        GROUP, HEAD_DIM,
                    ),
                ),
                (
                    load_queries,
                    (
                        q, q_tiles.index(1), q_ready.index(1), q_free.index(1), notes, q_stride, 1,
                        GROUP, HEAD_DIM,
                    ),
                ),
            ],
            [4, 1, 1, 1],
            [232, 40, 40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    consume_converted,
                    (
                        q, out, q_tiles.index(0), rings, barriers, notes, q_stride, out_stride, factor, 0,
                        GROUP, HEAD_DIM, QUERIES, STAGES,
                    ),
                ),
                (
                    consume_converted,
                    (
                        q, out, q_tiles.index(1), rings, barriers, notes, q_stride, out_stride, factor, 1,
                        GROUP, HEAD_DIM, QUERIES, STAGES,
                    ),
                ),
                (
                    convert_pages,
                    (
                        k_cache, v_cache, k_scale, v_scale, rings, barriers, notes, block_table,
                        table_stride, block_stride, scale_stride, where, TOKEN_STRIDE, HEAD_STRIDE, LAYOUT,
                        KV_HEADS, HEAD_DIM, PAGE, QUERIES, SEQUENCES, CHOOSE, STAGES,
                    ),
                ),
            ],
            [4, 4],
            [CONSUMER, PRODUCER],
        )  # fmt: skip


def why_not(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sequences: int,
    sliding_window: int | None,
    softcap: float | None,
) -> str | None:
    """Why `prefill` cannot take a call of `prefill_attention` on a Hopper card; None where it can."""
    page, kv_heads, _ = k_cache.shape[1:]
    head_dim = q.shape[2]
    plain = layout_of(k_cache).dtype is None
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"queries are {q.dtype}"
    if head_dim != 128 and not (plain and head_dim == 64):
        return f"head_dim {head_dim}"
    if sliding_window is not None or softcap is not None:
        return "a window or soft-capped scores"
    if q.shape[1] // kv_heads > 2 * ROWS.value or sequences > MAX_SEQUENCES:
        return "too many heads in a group, or sequences"
    if not plain and not SPILL_FREE:
        return "this triton's assembler keeps values of the converting kernel in memory"
    if k_cache.stride() != v_cache.stride():
        return "keys and values lie differently"
    if page < (TOKENS.value if plain else SMALLEST_CONVERTED):
        return f"pages of {page} tokens"
    if plain and not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        return "pages that do not lie one behind another"
    return None


def prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    num_decodes: int,
    *,
    choose: bool,
) -> None:
    """What `prefill_attention` does, where `why_not` is None."""
    tokens, heads, head_dim = q.shape
    page, kv_heads = k_cache.shape[1:3]
    layout = layout_of(k_cache).name
    group = heads // kv_heads
    queries = 2 * ROWS.value // group
    sequences = block_table.shape[0] - num_decodes
    tiles = kv_heads * ((tokens - num_decodes) // queries + sequences)
    programs = min(tiles, multiprocessors(q.device))
    keys, values = (_pages(c) if layout == "auto" else c.view(torch.int32) for c in (k_cache, v_cache))
    strides = k_cache.stride() if layout == "auto" else keys.stride()
    overlap = overlaps(q.device)
    _kernel[(programs,)](
        q,
        keys,
        values,
        k_scale,
        v_scale,
        block_table[num_decodes:],
        query_start[num_decodes:],
        context_lens[num_decodes:],
        out,
        q.stride(0),
        out.stride(0),
        block_table.stride(0),
        strides[0],
        0 if k_scale is None else k_scale.stride(0),
        scale * LOG2E,
        num_decodes,
        sequences,
        tiles,
        programs,
        arrival_counters(q.device, 1),
        TOKEN_STRIDE=strides[1],
        HEAD_STRIDE=strides[2],
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page,
        QUERIES=queries,
        SEQUENCES=sequence_lanes(sequences),
        LAYOUT=FORMS[layout],
        CHOOSE=choose,
        STAGES=3 if layout == "auto" and head_dim == 128 else 2,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=4,
        maxnreg=168,
    )


def _pages(cache: torch.Tensor) -> TensorDescriptor:
    """The cache as lines of tokens, read a page of one head at a time."""
    lines = cache.view(cache.shape[0] * cache.shape[1], cache.shape[2] * cache.shape[3])
    return rows_descriptor(lines, TOKENS.value, COLUMNS.value)
