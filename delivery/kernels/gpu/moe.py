"""Grouped products of a mixture of experts: tokens sorted by expert, one launch for all experts.

Each expert's tokens fill whole row tiles, so a tile multiplies with one expert's weight. The order is found
on the device, without reading anything back: the grid covers the most tiles that any routing can need, and
those beyond the last leave at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from delivery.kernels.gpu.activation import silu_mul


@triton.jit(do_not_specialize=["count"])
def _grouped(
    x,
    weight,
    routing,
    pairs,
    owner,
    out,
    count,
    N,
    K,
    experts,
    PER_ROW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[p] = x[p // PER_ROW] · weight[expert of p]ᵀ (· routing[p]) for the (token, choice) pairs p."""
    block = tl.program_id(1)
    expert = tl.load(owner + block).to(tl.int64)
    if expert < experts:
        pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        inside = pair < count
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        x_rows = x + (pair // PER_ROW)[:, None] * K
        w_rows = weight + expert * N * K + n.to(tl.int64)[None, :] * K
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            a = tl.load(x_rows + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
            b = tl.load(w_rows + k[:, None], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        if WEIGHTED:
            total *= tl.load(routing + pair, mask=inside, other=0.0).to(tl.float32)[:, None]
        where = pair[:, None] * N + n[None, :]
        tl.store(out + where, total.to(out.dtype.element_ty), mask=inside[:, None] & (n < N)[None, :])


def sorted_pairs(experts: torch.Tensor, count: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(pairs int32 [blocks · block_m], owner int32 [blocks]) of experts [T, k], `count` experts.

    A pair is t · k + choice; places that no pair fills hold T · k. owner is the expert of each block of
    pairs, `count` beyond the last block in use.
    """
    flat = experts.reshape(-1)
    total = flat.numel()
    blocks = min(total, -(-total // block_m) + count)
    per_expert = torch.zeros(count, dtype=torch.int64, device=flat.device)
    per_expert.scatter_add_(0, flat, torch.ones_like(flat))
    padded_end = ((per_expert + block_m - 1) // block_m * block_m).cumsum(0)
    padded_start = padded_end - (per_expert + block_m - 1) // block_m * block_m
    start = per_expert.cumsum(0) - per_expert
    order = flat.argsort(stable=True)
    expert = flat[order]
    place = padded_start[expert] + torch.arange(total, device=flat.device) - start[expert]
    pairs = torch.full((blocks * block_m,), total, dtype=torch.int32, device=flat.device)
    pairs[place] = order.to(torch.int32)
    first = torch.arange(blocks, device=flat.device) * block_m
    return pairs, torch.searchsorted(padded_end, first, right=True).to(torch.int32)


def fused_moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routing: torch.Tensor,
    experts: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """See `delivery.kernels.fused_moe`."""
    tokens, hidden = x.shape
    chosen = experts.shape[1]
    if tokens == 0:
        return torch.empty_like(x)
    x = x.contiguous()
    count = gate_up.shape[0]
    block_m = 16 if tokens * chosen <= 4 * count else 64
    pairs, owner = sorted_pairs(experts, count, block_m)
    routing = routing.contiguous()

    def product(rows: torch.Tensor, weight: torch.Tensor, per_row: int, weighted: bool) -> torch.Tensor:
        n, k = weight.shape[1], weight.shape[2]
        out = torch.empty(tokens * chosen, n, dtype=x.dtype, device=x.device)
        _grouped[(triton.cdiv(n, 64), owner.shape[0])](
            rows,
            weight,
            routing,
            pairs,
            owner,
            out,
            tokens * chosen,
            n,
            k,
            count,
            PER_ROW=per_row,
            WEIGHTED=weighted,
            BLOCK_M=block_m,
            BLOCK_N=64,
            BLOCK_K=64,
            num_warps=4,
            num_stages=4,
        )
        return out

    inner = silu_mul(product(x, gate_up, chosen, False), activation)
    parts = product(inner, down, 1, True)
    if chosen == 1:
        return parts
    return parts.view(tokens, chosen, hidden).sum(1, dtype=torch.float32).to(x.dtype)
