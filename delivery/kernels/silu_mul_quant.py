"""Gated activation whose output is quantised per token, for an 8-bit down projection (one pass)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from delivery.kernels import silu_mul
from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.rms_norm_quant import quant_tolerance
from delivery.kernels.row_quant import quantize_rows, why_not_dtype
from delivery.kernels.targets import why_not_cpu

MAX_FEATURES = 32768
"""Features of a row that one program holds in registers between the maximum and the division."""


def reference(
    gate_up: torch.Tensor, dtype: torch.dtype, activation: str = "silu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up [T, 2I], gate first → (q [T, I] in `dtype` (int8 or fp8), scale float32 [T, 1])."""
    work = torch.promote_types(gate_up.dtype, torch.float32)
    return quantize_rows(silu_mul.reference(gate_up.to(work), activation), dtype)


def _triton(
    gate_up: torch.Tensor, dtype: torch.dtype, activation: str = "silu"
) -> tuple[torch.Tensor, torch.Tensor]:
    from delivery.kernels.gpu.activation import silu_mul_quant

    return silu_mul_quant(gate_up, dtype, activation)


def _why_not(gate_up: torch.Tensor, dtype: torch.dtype, activation: str = "silu") -> str | None:
    if gate_up.shape[-1] // 2 > MAX_FEATURES:
        return f"{gate_up.shape[-1] // 2} features a row are more than {MAX_FEATURES}"
    return why_not_dtype(dtype) or silu_mul.why_not(gate_up, activation)


def _cases() -> Iterator[Case]:
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        for features in silu_mul.INTERMEDIATE_SIZES:

            def make(
                device: torch.device,
                float_dtype: torch.dtype,
                seed: int,
                n: int = features,
                q_dtype: torch.dtype = dtype,
            ) -> tuple[object, ...]:
                return silu_mul.gate_up_inputs(device, float_dtype, seed, n), q_dtype

            yield Case(f"{features}-{str(dtype).removeprefix('torch.')}", make, quant_tolerance(dtype))


OP = Op(
    name="silu_mul_quant",
    reference=reference,
    backends={"cpu": Backend(reference, why_not_cpu), "triton": Backend(_triton, _why_not)},
    cases=_cases,
)
