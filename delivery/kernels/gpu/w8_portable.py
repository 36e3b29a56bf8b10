"""8-bit weights in plain Triton: any card from compute capability 8.0, any stride, any K."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _product(
    x,
    weight,
    w_scale,
    x_scale,
    bias,
    residual,
    out,
    M,
    N,
    K,
    x_stride,
    w_stride,
    scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    X_SCALED: tl.constexpr,
    X_SCALE_STRIDE: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x + m.to(tl.int64)[:, None] * x_stride
    w_rows = weight + n.to(tl.int64)[None, :] * w_stride
    INTEGER: tl.constexpr = X_SCALED and weight.dtype.element_ty == tl.int8
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INTEGER else tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x_rows + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(w_rows + k[:, None], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        if not X_SCALED:
            b = b.to(tl.float32).to(a.dtype)
        if BLOCKS:
            part = tl.dot(a, b, input_precision="ieee")
            where = (n // 128).to(tl.int64) * scale_stride + start // 128
            total += part * tl.load(w_scale + where, mask=n < N, other=0.0)[None, :]
        else:
            total = tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)
    value = total.to(tl.float32)
    if not BLOCKS:
        value *= tl.load(w_scale + n, mask=n < N, other=0.0)[None, :]
    if X_SCALED:
        value *= tl.load(x_scale + m * X_SCALE_STRIDE, mask=m < M, other=0.0)[:, None]
    if BIAS:
        value += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    where = m.to(tl.int64)[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    if RESIDUAL:
        value += tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + where, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _finish(
    sums,
    w_scale,
    x_scale,
    bias,
    residual,
    out,
    N,
    BLOCK: tl.constexpr,
    X_SCALE_STRIDE: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    value = tl.load(sums + m * N + n, mask=inside, other=0).to(tl.float32)
    value *= tl.load(w_scale + n, mask=inside, other=0.0) * tl.load(x_scale + m * X_SCALE_STRIDE)
    if BIAS:
        value += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        value += tl.load(residual + m * N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + m * N + n, value.to(out.dtype.element_ty), mask=inside)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    blocks: bool,
    out_dtype: torch.dtype,
    *,
    x_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] · weight [N, K]ᵀ with scales; x of the weight's dtype with `x_scale`, or float without."""
    rows, (n, k) = x.shape[0], weight.shape
    out = torch.empty(rows, n, dtype=out_dtype, device=x.device)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 256 else 128
    block_n = 64 if rows <= 256 else 128
    if rows:
        _product[(triton.cdiv(n, block_n), triton.cdiv(rows, block_m))](
            x,
            weight,
            w_scale,
            w_scale if x_scale is None else x_scale,
            out if bias is None else bias,
            out if residual is None else residual,
            out,
            rows,
            n,
            k,
            x.stride(0),
            weight.stride(0),
            w_scale.stride(0),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=128,
            BLOCKS=blocks,
            X_SCALED=x_scale is not None,
            X_SCALE_STRIDE=0 if x_scale is None or x_scale.numel() == 1 else 1,
            BIAS=bias is not None,
            RESIDUAL=residual is not None,
            num_warps=4 if block_m < 128 else 8,
            num_stages=4 if block_m < 64 else 3,
        )
    return out


def finish(
    sums: torch.Tensor,
    w_scale: torch.Tensor,
    x_scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """int32 sums [M, N] of a library product, scaled, plus bias and residual, as `out_dtype`."""
    rows, n = sums.shape
    out = torch.empty(rows, n, dtype=out_dtype, device=sums.device)
    block = 1024
    if rows:
        _finish[(rows, triton.cdiv(n, block))](
            sums,
            w_scale,
            x_scale,
            out if bias is None else bias,
            out if residual is None else residual,
            out,
            n,
            BLOCK=block,
            X_SCALE_STRIDE=0 if x_scale.numel() == 1 else 1,
            BIAS=bias is not None,
            RESIDUAL=residual is not None,
        )
    return out
