"""Weights to 8 bits, one scale an output feature: scale = absmax / Q_MAX."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.quantize_per_token import tolerance
from delivery.kernels.row_quant import Q_MAX, quantize_rows, why_not_dtype
from delivery.kernels.targets import why_not_cpu, why_not_triton
from delivery.kernels.w8_rules import why_not_dtype_here


def reference(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] → (q [N, K] in `dtype`, scale float32 [N, 1]); float64 in, float64 scale out."""
    return quantize_rows(weight, dtype)


def _triton(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    from delivery.kernels.gpu.quantize import quantize_rows as launch

    return launch(weight, dtype)


def _why_not_triton(weight: torch.Tensor, dtype: torch.dtype) -> str | None:
    if weight.ndim != 2 or weight.stride(1) != 1:
        return "the weight is not two-dimensional with contiguous rows"
    return why_not_dtype(dtype) or why_not_triton(weight) or why_not_dtype_here(dtype, weight.device)


def _cases() -> Iterator[Case]:
    for dtype8 in Q_MAX:
        for rows, k in ((6, 1024), (5, 77)):

            def make(
                device: torch.device,
                dtype: torch.dtype,
                seed: int,
                rows: int = rows,
                k: int = k,
                dtype8: torch.dtype = dtype8,
            ) -> tuple[object, ...]:
                generator = torch.Generator("cpu").manual_seed(seed)
                return (torch.randn(rows, k, generator=generator) * 0.02).to(device, dtype), dtype8

            yield Case(f"{str(dtype8).removeprefix('torch.')}-{rows}x{k}", make, tolerance(dtype8))


OP = Op(
    name="quantize_per_channel",
    reference=reference,
    backends={"cpu": Backend(reference, why_not_cpu), "triton": Backend(_triton, _why_not_triton)},
    cases=_cases,
)
