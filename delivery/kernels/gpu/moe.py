"""Grouped products of a mixture of experts: tokens sorted by expert, one launch for all experts.

Each expert's tokens fill whole row tiles, so a tile multiplies with one expert's weight. The order is found
on the device, without reading anything back: the grid covers the most tiles that any routing can need, and
those beyond the last leave at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from delivery.kernels.expert_layout import MIDDLE, TURN, PackedExperts
from delivery.kernels.gpu.activation import silu_mul
from delivery.kernels.gpu.quantize import quantize_rows


@triton.jit(do_not_specialize=["count"])
def _grouped(
    x,
    x_scale,
    weight,
    w_scale,
    w_zero,
    routing,
    pairs,
    owner,
    out,
    count,
    N,
    K,
    groups,
    experts,
    PER_ROW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    X_SCALED: tl.constexpr,
    MIDDLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[p] = x[p // PER_ROW] · weight[expert of p]ᵀ (· routing[p]) for the (token, choice) pairs p.

    BITS: 16 for float weights, 8 with a scale a row, 4 with `groups` scales a row (`expert_layout`).
    X_SCALED: x is in 8 bits too, with a scale a row.
    """
    block = tl.program_id(1)
    expert = tl.load(owner + block).to(tl.int64)
    if expert < experts:
        pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        inside = pair < count
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = expert * N + n.to(tl.int64)
        x_rows = x + (pair // PER_ROW)[:, None] * K
        INTEGER: tl.constexpr = X_SCALED and weight.dtype.element_ty == tl.int8
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INTEGER else tl.float32)
        if BITS == 4:
            half = tl.arange(0, BLOCK_K // 2)
            w_rows = weight + row[None, :] * (K // 2)
            for start in range(0, K, BLOCK_K):
                at = row * groups + start // (K // groups)
                scale = tl.load(w_scale + at, mask=n < N, other=0.0).to(tl.float32)
                zero = tl.full([BLOCK_N], MIDDLE, tl.float32)
                if ZERO:
                    zero = tl.load(w_zero + at, mask=n < N, other=0).to(tl.float32)
                both = tl.load(w_rows + (start // 2 + half)[:, None], mask=(n < N)[None, :], other=0)
                low = ((both & 15).to(tl.float32) - zero[None, :]) * scale[None, :]
                high = ((both >> 4).to(tl.float32) - zero[None, :]) * scale[None, :]
                a = tl.load(x_rows + (start + half)[None, :], mask=inside[:, None], other=0.0)
                total = tl.dot(a, low.to(a.dtype), total, input_precision="ieee")
                a = tl.load(x_rows + (start + BLOCK_K // 2 + half)[None, :], mask=inside[:, None], other=0.0)
                total = tl.dot(a, high.to(a.dtype), total, input_precision="ieee")
        else:
            w_rows = weight + row[None, :] * K
            for start in range(0, K, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                a = tl.load(x_rows + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
                b = tl.load(w_rows + k[:, None], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
                if BITS == 8 and not X_SCALED:
                    b = b.to(tl.float32).to(a.dtype)
                total = tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)
        value = total.to(tl.float32)
        if BITS == 8:
            value *= tl.load(w_scale + row, mask=n < N, other=0.0)[None, :]
        if X_SCALED:
            value *= tl.load(x_scale + pair // PER_ROW, mask=inside, other=0.0)[:, None]
        if WEIGHTED:
            value *= tl.load(routing + pair, mask=inside, other=0.0).to(tl.float32)[:, None]
        where = pair[:, None] * N + n[None, :]
        tl.store(out + where, value.to(out.dtype.element_ty), mask=inside[:, None] & (n < N)[None, :])


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
    return _mixture(x, gate_up, down, routing, experts, activation)


def fused_moe_quant(
    x: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    routing: torch.Tensor,
    experts: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """See `delivery.kernels.fused_moe_quant`."""
    return _mixture(x, gate_up, down, routing, experts, activation)


def _mixture(
    x: torch.Tensor,
    gate_up: torch.Tensor | PackedExperts,
    down: torch.Tensor | PackedExperts,
    routing: torch.Tensor,
    experts: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    tokens, hidden = x.shape
    chosen = experts.shape[1]
    if tokens == 0:
        return torch.empty_like(x)
    x = x.contiguous()
    count = gate_up.shape[0]
    block_m = 16 if tokens * chosen <= 4 * count else 64
    pairs, owner = sorted_pairs(experts, count, block_m)
    routing = routing.contiguous()

    def product(
        rows: torch.Tensor, weight: torch.Tensor | PackedExperts, per_row: int, weighted: bool
    ) -> torch.Tensor:
        packed = weight if isinstance(weight, PackedExperts) else None
        _, n, k = weight.shape
        row_scale = rows
        if packed is not None and packed.act_dtype is not None:
            rows, row_scale = quantize_rows(rows, packed.act_dtype)
        values = weight if isinstance(weight, torch.Tensor) else weight.values
        zero_point = None if packed is None else packed.zero_point
        out = torch.empty(tokens * chosen, n, dtype=x.dtype, device=x.device)
        _grouped[(triton.cdiv(n, 64), owner.shape[0])](
            rows,
            row_scale,
            values,
            values if packed is None else packed.scale,
            values if zero_point is None else zero_point,
            routing,
            pairs,
            owner,
            out,
            tokens * chosen,
            n,
            k,
            1 if packed is None else packed.scale.shape[2],
            count,
            PER_ROW=per_row,
            WEIGHTED=weighted,
            BITS=16 if packed is None else packed.bits,
            ZERO=zero_point is not None,
            X_SCALED=packed is not None and packed.act_dtype is not None,
            MIDDLE=MIDDLE,
            BLOCK_M=block_m,
            BLOCK_N=64,
            BLOCK_K=TURN,
            num_warps=4,
            num_stages=4,
        )
        return out

    inner = silu_mul(product(x, gate_up, chosen, False), activation)
    parts = product(inner, down, 1, True)
    if chosen == 1:
        return parts
    return parts.view(tokens, chosen, hidden).sum(1, dtype=torch.float32).to(x.dtype)
