"""Causal attention over the paged KV cache: decode and chunked prefill in one call.

softmax(scale · q kᵀ) v with the online softmax of FlashAttention (arXiv 2205.14135) in the fast
backends; pages as in vLLM (arXiv 2309.06180); decode splits each sequence over the card
(flash-decoding) in equal shares, however the lengths differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from delivery.kernels.kv_layout import LAYOUTS, gather, kv_layout, layout_of, scatter
from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.targets import why_not_cpu, why_not_triton

MAX_HEAD_DIM = 256
MAX_SEQUENCES = 4096
"""Sequences of one call: every program of the decode kernel sums their lengths for itself."""


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_decodes: int | None = None,
) -> torch.Tensor:
    """q [T, heads, head_dim] → [T, heads, head_dim] in q's dtype.

    k_cache, v_cache [num_blocks, block_size, kv_heads, stored_dim], scales as in `kv_layout`.
    block_table int32 [B, max_blocks]; query_start int32 [B + 1], first row of q of each sequence;
    context_lens int32 [B], tokens of the sequence in the cache, this call's own included: query i of
    the n of a sequence stands at position context_len − n + i and sees no later position.
    A context_len of 0 (padding) gives zeros.
    sliding_window: positions a query sees, its own included. softcap: s → softcap · tanh(s / softcap)
    after `scale`.
    num_decodes: leading sequences with exactly one query; None: all if T == B, else none; −1: the host does
    not know (a recorded step: sequences without queries and rows behind the last sequence are padding). A
    hint for the fast backends, which never read a tensor on the host.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q)
    group = q.shape[1] // k_cache.shape[2]
    starts, lengths = query_start.tolist(), context_lens.tolist()
    for b, length in enumerate(lengths):
        first, last = starts[b], starts[b + 1]
        if length == 0 or first == last:
            continue
        slots = _slots(block_table[b], length, k_cache.shape[1])
        k, v = (
            layout_of(cache).dequantize(*gather(cache, scales, slots)).to(work)
            for cache, scales in ((k_cache, k_scale), (v_cache, v_scale))
        )
        scores = torch.einsum("qhd,khd->hqk", q[first:last].to(work), k.repeat_interleave(group, 1)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = visible(last - first, length, sliding_window, q.device)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).to(q.dtype)
    return out


def visible(queries: int, keys: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """bool [queries, keys]: which keys each of the last `queries` positions sees."""
    position = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None]
    seen = key <= position
    return seen if sliding_window is None else seen & (key > position - sliding_window)


def _slots(blocks: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    position = torch.arange(length, device=blocks.device)
    return blocks.to(torch.int64)[position // block_size] * block_size + position % block_size


def _cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_decodes: int | None = None,
) -> torch.Tensor:
    if softcap is not None:
        where = (block_table, query_start, context_lens, scale, sliding_window, softcap)
        return reference(q, k_cache, v_cache, *where, k_scale, v_scale)
    out = torch.zeros_like(q)
    block_size = k_cache.shape[1]
    starts, lengths = query_start.tolist(), context_lens.tolist()
    for b, length in enumerate(lengths):
        first, last = starts[b], starts[b + 1]
        if length == 0 or first == last:
            continue
        begin = 0 if sliding_window is None else max(0, length - (last - first) - sliding_window + 1)
        begin -= begin % block_size
        blocks = block_table[b, begin // block_size : -(-length // block_size)].to(torch.int64)
        k, v = (
            _dense(cache, scales, blocks, q.dtype)[:, : length - begin]
            for cache, scales in ((k_cache, k_scale), (v_cache, v_scale))
        )
        mask = None
        if last - first > 1 or sliding_window is not None:
            mask = visible(last - first, length - begin, sliding_window, q.device)
        heads_first = q[first:last].transpose(0, 1)[None]
        attended = scaled_dot_product_attention(
            heads_first, k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[first:last] = attended[0].transpose(0, 1)
    return out


def _dense(
    cache: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[kv_heads, tokens, head_dim] of whole blocks, dequantised."""
    values = cache[blocks].flatten(0, 1)
    if scales is None:
        return values.to(dtype).transpose(0, 1)
    flat = scales[blocks].permute(0, 3, 1, 2).flatten(0, 1)
    return layout_of(cache).dequantize(values, flat).to(dtype).transpose(0, 1)


def _triton(*args: Any, **kwargs: Any) -> torch.Tensor:
    from delivery.kernels.gpu.attention import paged_attention

    return paged_attention(*args, **kwargs)


def _why_not(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    *_args: object,
    **_kwargs: object,
) -> str | None:
    if q.shape[-1] > MAX_HEAD_DIM or q.shape[-1] % 16:
        return f"head_dim {q.shape[-1]} is not a multiple of 16 up to {MAX_HEAD_DIM}"
    block_size = k_cache.shape[1]
    if block_size < 16 or block_size & (block_size - 1):
        return f"block size {block_size} is not a power of two of 16 or more"
    if block_table.shape[0] > MAX_SEQUENCES:
        return f"{block_table.shape[0]} sequences are more than {MAX_SEQUENCES}"
    return why_not_triton(q)


_SHAPES = (
    # name, heads, kv_heads, head_dim, block_size, [(queries, context)], sliding_window, softcap
    ("decode", 8, 2, 128, 64, ((1, 130), (1, 1), (1, 64), (1, 65)), None, None),
    ("decode-small-blocks", 7, 1, 64, 16, ((1, 33), (1, 200)), None, None),
    ("decode-window", 6, 2, 96, 32, ((1, 150), (1, 7)), 40, None),
    ("decode-softcap", 4, 4, 256, 32, ((1, 70), (1, 0)), None, 30.0),
    ("decode-odd-head", 5, 1, 80, 16, ((1, 50),), None, None),
    ("prefill", 8, 2, 128, 64, ((70, 70), (3, 3)), None, None),
    ("chunk", 8, 1, 64, 16, ((33, 150), (1, 20), (17, 17)), None, None),
    ("chunk-window", 3, 1, 80, 32, ((40, 120), (20, 20)), 33, None),
    ("chunk-softcap", 4, 2, 256, 16, ((20, 41),), 25, 50.0),
    ("mixed", 12, 2, 96, 32, ((1, 90), (1, 33), (35, 64)), None, None),
    ("chunk-large-pages", 8, 2, 128, 64, ((33, 150), (1, 20), (17, 17), (150, 333)), None, None),
    ("chunk-small-pages", 4, 1, 128, 16, ((70, 200), (40, 40)), None, None),
    ("chunk-seven-heads", 7, 1, 128, 64, ((50, 128), (64, 190)), None, None),
    ("chunk-no-context", 4, 1, 128, 64, ((3, 0), (20, 41), (150, 0)), None, None),
    ("chunk-one-head", 1, 1, 64, 64, ((200, 290), (2, 64)), None, None),
    ("recorded-large", 8, 2, 128, 64, ((1, 90), (20, 41), (1, 1), (133, 263), (0, 0)), None, None),
    ("recorded", 8, 2, 64, 16, ((1, 90), (20, 41), (1, 1), (33, 33), (0, 0), (0, 0)), None, None),
)


def _cases() -> Iterator[Case]:
    for kv_dtype in LAYOUTS:
        for shape in _SHAPES:

            def make(
                device: torch.device, dtype: torch.dtype, seed: int, s: Any = shape, kv: str = kv_dtype
            ) -> tuple[object, ...]:
                _, heads, kv_heads, head_dim, block_size, lengths, window, softcap = s
                inputs = paged_inputs(device, dtype, seed, kv, heads, kv_heads, head_dim, block_size, lengths)
                q, k_cache, v_cache, table, starts, contexts, k_scale, v_scale = inputs
                decodes = next((i for i, (n, _) in enumerate(lengths) if n != 1), len(lengths))
                if s[0].startswith("recorded"):
                    q, decodes = torch.cat((q, q[:3])), -1
                at = (table, starts, contexts, head_dim**-0.5, window, softcap)
                return q, k_cache, v_cache, *at, k_scale, v_scale, decodes

            tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
            yield Case(f"{shape[0]}-{kv_dtype}", make, tolerance)


def paged_inputs(
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    kv_dtype: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    lengths: tuple[tuple[int, int], ...],
) -> tuple[Any, ...]:
    """(q, k_cache, v_cache, block_table, query_start, context_lens, k_scale, v_scale), random.

    lengths: (queries, context) of each sequence; their blocks are shuffled. Slots that no sequence owns
    hold NaN where the dtype has one, as does the block that table entries past a sequence's end name.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    layout = kv_layout(kv_dtype)
    used = [-(-context // block_size) for _, context in lengths]
    order = torch.randperm(sum(used), generator=generator).to(torch.int32) + 1
    table = torch.zeros(len(lengths), max(used) + 2, dtype=torch.int32)
    caches = []
    for _ in "kv":
        values, scales = layout.allocate(sum(used) + 1, block_size, kv_heads, head_dim, dtype, "cpu")
        for tensor in (values, scales):
            if tensor is not None and tensor.is_floating_point():
                tensor.fill_(float("nan"))
        caches.append((values, scales))
    taken = 0
    for b, (_, context) in enumerate(lengths):
        table[b, : used[b]] = order[taken : taken + used[b]]
        taken += used[b]
        slots = _slots(table[b], context, block_size)
        for values, scales in caches:
            x = torch.randn(context, kv_heads, head_dim, generator=generator).to(dtype)
            scatter(values, scales, slots, *layout.quantize(x))
    tokens = [n for n, _ in lengths]
    starts = torch.tensor([0, *torch.tensor(tokens).cumsum(0).tolist()], dtype=torch.int32)
    contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    q = torch.randn(sum(tokens), heads, head_dim, generator=generator).to(dtype)
    (k, k_scale), (v, v_scale) = caches
    tensors = (q, k, v, table, starts, contexts, k_scale, v_scale)
    return tuple(None if t is None else t.to(device) for t in tensors)


OP = Op(
    name="paged_attention",
    reference=reference,
    backends={"cpu": Backend(_cpu, why_not_cpu), "triton": Backend(_triton, _why_not)},
    cases=_cases,
)
