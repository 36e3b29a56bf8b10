"""RMSNorm, with residual addition and with quantised output: one program a row, one pass over memory.

Bytes a row of H features: H · itemsize read and written; with the residual twice that; the quantised
output is one byte a feature. Nothing is read twice, the row stays in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from delivery.kernels.gpu.overlap import gdc_launch_dependents, gdc_wait, overlaps
from delivery.kernels.gpu.rounding import to_quantised
from delivery.kernels.row_quant import Q_MAX, TINY

TRITON_DTYPE = {
    torch.int8: tl.int8,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}


@triton.jit
def _norm_row(
    x,
    residual,
    weight,
    out,
    total,
    scale,
    x_stride,
    residual_stride,
    eps,
    hidden,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    Q_MAX: tl.constexpr,
    TINY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if ADD:
        other = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * hidden + column, value, mask=inside)
    wide = value.to(tl.float32)
    if PLUS_ONE:
        factor += 1.0
    normal = wide * tl.rsqrt(tl.sum(wide * wide) / hidden + eps) * factor
    if Q_MAX > 0:
        row_scale = tl.maximum(tl.max(tl.where(inside, tl.abs(normal), 0.0)), TINY) / Q_MAX
        tl.store(scale + row, row_scale)
        quantised = to_quantised(normal * (1.0 / row_scale), Q_MAX, out.dtype.element_ty)
        tl.store(out + row * hidden + column, quantised, mask=inside)
    else:
        tl.store(out + row * hidden + column, normal.to(out.dtype.element_ty), mask=inside)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    plus_one: bool,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(normed or quantised rows, scales or None, sum or None)."""
    hidden = x.shape[-1]
    rows = _rows(x)
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    scale = None if dtype is None else torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    other = rows if residual is None else _rows(residual)
    if rows.shape[0]:
        overlap = overlaps(x.device)
        block = triton.next_power_of_2(hidden)
        _norm_row[(rows.shape[0],)](
            rows,
            other,
            weight,
            out,
            total,
            scale,
            rows.stride(0),
            other.stride(0),
            eps,
            hidden,
            BLOCK=block,
            ADD=residual is not None,
            PLUS_ONE=plus_one,
            Q_MAX=0.0 if dtype is None else Q_MAX[dtype],
            TINY=TINY,
            OVERLAP=overlap,
            launch_pdl=overlap,
            num_warps=max(1, min(16, block // 512)),
        )
    return out, scale, total


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, features] with unit stride along the features."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
    """See `delivery.kernels.rms_norm`."""
    return _launch(x, None, weight, eps, plus_one, None)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `delivery.kernels.add_rms_norm`."""
    out, _, total = _launch(x, residual, weight, eps, plus_one, None)
    assert total is not None
    return out, total


def rms_norm_quant(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, plus_one: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `delivery.kernels.rms_norm_quant`."""
    out, scale, _ = _launch(x, None, weight, eps, plus_one, dtype)
    assert scale is not None
    return out, scale


def add_rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    plus_one: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `delivery.kernels.add_rms_norm_quant`."""
    out, scale, total = _launch(x, residual, weight, eps, plus_one, dtype)
    assert scale is not None
    assert total is not None
    return out, scale, total
