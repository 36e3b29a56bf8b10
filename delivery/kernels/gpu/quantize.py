"""Rows to 8 bits: one program a row, the row stays in registers between maximum and division."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from delivery.kernels.gpu.overlap import gdc_launch_dependents, gdc_wait, overlaps
from delivery.kernels.gpu.rounding import to_quantised
from delivery.kernels.row_quant import Q_MAX, TINY


@triton.jit
def _rows(
    x,
    out,
    scale,
    stride,
    K,
    BLOCK: tl.constexpr,
    FIXED: tl.constexpr,
    Q_MAX: tl.constexpr,
    TINY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < K
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if FIXED:
        step = tl.load(scale)
    else:
        step = tl.maximum(tl.max(tl.abs(value)), TINY) / Q_MAX
        tl.store(scale + row, step)
    tl.store(
        out + row * K + column, to_quantised(value * (1.0 / step), Q_MAX, out.dtype.element_ty), mask=inside
    )


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, K], last axis contiguous → (q [R, K], scale float32 [R, 1]); a given scale [1] is kept."""
    rows, k = x.shape
    out = torch.empty(rows, k, dtype=dtype, device=x.device)
    steps = scale
    if steps is None:
        steps = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    if rows:
        overlap = overlaps(x.device)
        _rows[(rows,)](
            x,
            out,
            steps,
            x.stride(0),
            k,
            BLOCK=block,
            FIXED=scale is not None,
            Q_MAX=Q_MAX[dtype],
            TINY=TINY,
            OVERLAP=overlap,
            launch_pdl=overlap,
            num_warps=max(1, min(16, block // 512)),
        )
    return out, steps
