"""Paged attention of a step: its leading single-query sequences decode, the others prefill."""

from __future__ import annotations

import torch

from delivery.kernels.gpu.decode_attention import decode_attention
from delivery.kernels.gpu.prefill_attention import prefill_attention


def paged_attention(
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
    """See `delivery.kernels.paged_attention`."""
    tokens, sequences = q.shape[0], block_table.shape[0]
    if num_decodes is None:
        num_decodes = tokens if tokens == sequences else 0
    options = (scale, sliding_window, softcap, k_scale, v_scale)
    if num_decodes < 0:
        # Rows of padding belong to nobody: zero, so that what is computed from them stays finite.
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        decode_attention(
            q, k_cache, v_cache, block_table, context_lens, out, *options, query_start=query_start
        )
        prefill_attention(
            q, k_cache, v_cache, block_table, query_start, context_lens, out, *options, 0, choose=True
        )
        return out
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_decodes:
        n = num_decodes
        decode_attention(q[:n], k_cache, v_cache, block_table[:n], context_lens[:n], out[:n], *options)
    if tokens > num_decodes:
        prefill_attention(
            q, k_cache, v_cache, block_table, query_start, context_lens, out, *options, num_decodes
        )
    return out
