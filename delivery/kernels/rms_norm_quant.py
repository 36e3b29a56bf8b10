"""RMSNorm whose output is quantised per token, for the 8-bit linear layers behind it (one pass)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from delivery.kernels import rms_norm
from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.row_quant import quantize_rows, why_not_dtype
from delivery.kernels.targets import why_not_cpu


def quant_tolerance(dtype: torch.dtype) -> dict[torch.dtype, float]:
    """For the quantised rows against the float64 reference's: a value on a rounding edge may fall either way.

    Such a fall is a step of 1 / 127 of the row's largest value in int8, but a quarter of itself in e5m2.
    """
    coarse = 2.5 if dtype == torch.float8_e5m2 else 1.0
    return {torch.float32: 1e-3 * coarse, torch.float16: 8e-3 * coarse, torch.bfloat16: 2e-2 * coarse}


def reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H], weight [H] → (q [T, H] in `dtype` (int8 or fp8), scale float32 [T, 1])."""
    work = torch.promote_types(x.dtype, torch.float32)
    return quantize_rows(rms_norm.reference(x.to(work), weight, eps, plus_one), dtype)


def _triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    from delivery.kernels.gpu.norms import rms_norm_quant

    return rms_norm_quant(x, weight, eps, dtype, plus_one)


def _why_not(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, plus_one: bool = False
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
                return x, weight, 1e-5, q_dtype

            yield Case(f"h{hidden}-{str(dtype).removeprefix('torch.')}", make, quant_tolerance(dtype))


OP = Op(
    name="rms_norm_quant",
    reference=reference,
    backends={"cpu": Backend(reference, why_not_cpu), "triton": Backend(_triton, _why_not)},
    cases=_cases,
)
