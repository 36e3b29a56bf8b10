"""Triton kernel behind `kernels/gptq_columns.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 16


def gptq_columns(
    weight: torch.Tensor,
    factor: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    group: torch.Tensor,
    low: int,
    high: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `delivery.kernels.gptq_columns.reference`; weight is float32 and at most 128 columns wide."""
    rows, columns = weight.shape
    out = torch.empty((rows, columns), dtype=torch.uint8 if low >= 0 else torch.int8, device=weight.device)
    errors = torch.empty((rows, columns), dtype=torch.float32, device=weight.device)
    _kernel[(triton.cdiv(rows, _ROWS),)](
        weight,
        factor.contiguous(),
        scale.float().contiguous(),
        zero_point.float().contiguous(),
        group.to(torch.int32),
        out,
        errors,
        rows,
        columns,
        weight.stride(0),
        scale.shape[1],
        low,
        high,
        ROWS=_ROWS,
        COLUMNS=triton.next_power_of_2(columns),
    )
    return out, errors


@triton.jit
def _kernel(
    weight,
    factor,
    scale,
    zero_point,
    group,
    out,
    errors,
    rows,
    columns,
    weight_stride,
    scale_stride,
    low,
    high,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    inside = r < rows
    r64 = r.to(tl.int64)
    tile = tl.load(
        weight + r64[:, None] * weight_stride + c[None, :],
        mask=inside[:, None] & (c < columns)[None, :],
        other=0.0,
    )
    for b in range(columns):
        g = tl.load(group + b)
        step = tl.load(scale + r64 * scale_stride + g, mask=inside, other=1.0)
        shift = tl.load(zero_point + r64 * scale_stride + g, mask=inside, other=0.0)
        # Entries left of the diagonal are zero in an upper factor; the mask spares reading them.
        ahead = tl.load(factor + b * columns + c, mask=(c >= b) & (c < columns), other=0.0)
        pivot = tl.sum(tl.where(c == b, ahead, 0.0), axis=0)
        values = tl.sum(tl.where(c[None, :] == b, tile, 0.0), axis=1)
        ratio = values / step
        # Round half to even, as torch does: adding and taking away 1.5 · 2^23 leaves no fraction.
        rounded = tl.where(tl.abs(ratio) < 4194304.0, (ratio + 12582912.0) - 12582912.0, ratio)
        rounded = tl.minimum(tl.maximum(rounded + shift, low * 1.0), high * 1.0)
        error = (values - (rounded - shift) * step) / pivot
        at = r64 * columns + b
        tl.store(out + at, rounded.to(out.dtype.element_ty), mask=inside)
        tl.store(errors + at, error, mask=inside)
        # The column itself is changed too, but is not read again.
        tile = tile - error[:, None] * ahead[None, :]
