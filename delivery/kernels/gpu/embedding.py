"""Rows of the embedding table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _embed(table, token_ids, out, scale, stride, hidden, BLOCK: tl.constexpr, SCALED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids + token).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    value = tl.load(table + row * stride + column, mask=inside)
    if SCALED:
        factor = tl.cast(scale, out.dtype.element_ty).to(tl.float32)  # rounded first, as the family does
        value = (value.to(tl.float32) * factor).to(out.dtype.element_ty)
    tl.store(out + token * hidden + column, value, mask=inside)


def embedding(table: torch.Tensor, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
    """See `delivery.kernels.embedding`."""
    tokens, hidden = token_ids.shape[0], table.shape[1]
    out = torch.empty(tokens, hidden, dtype=table.dtype, device=table.device)
    block = min(1024, triton.next_power_of_2(hidden))
    if tokens:
        grid = (tokens, triton.cdiv(hidden, block))
        _embed[grid](table, token_ids, out, scale, table.stride(0), hidden, BLOCK=block, SCALED=scale != 1.0)
    return out
