"""Residual addition, RMSNorm and per-token quantisation in one pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from delivery.kernels import rms_norm, rms_norm_quant
from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.row_quant import why_not_dtype
from delivery.kernels.targets import why_not_cpu


def reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual [T, H] → (q [T, H] in `dtype`, scale float32 [T, 1], x + residual [T, H] in x's dtype)."""
    total = x + residual
    q, scale = rms_norm_quant.reference(total, weight, eps, dtype, plus_one)
    return q, scale, total


def _triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from delivery.kernels.gpu.norms import add_rms_norm_quant

    return add_rms_norm_quant(x, residual, weight, eps, dtype, plus_one)


def _why_not(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    plus_one: bool = False,
) -> str | None:
    return why_not_dtype(dtype) or rms_norm.why_not(x)


def _cases() -> Iterator[Case]:
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        for hidden in rms_norm.HIDDEN_SIZES:

            def make(
                device: torch.device,
                float_dtype: torch.dtype,
                seed: int,
                h: int = hidden,
                q_dtype: torch.dtype = dtype,
            ) -> tuple[object, ...]:
                x, weight = rms_norm.norm_inputs(device, float_dtype, seed, h)
                residual, _ = rms_norm.norm_inputs(device, float_dtype, seed + 1, h)
                return x, residual, weight, 1e-5, q_dtype

            name = f"h{hidden}-{str(dtype).removeprefix('torch.')}"
            yield Case(name, make, rms_norm_quant.quant_tolerance(dtype))


OP = Op(
    name="add_rms_norm_quant",
    reference=reference,
    backends={"cpu": Backend(reference, why_not_cpu), "triton": Backend(_triton, _why_not)},
    cases=_cases,
)
