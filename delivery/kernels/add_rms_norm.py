"""Residual addition and RMSNorm in one pass: r = x + residual, y = rms_norm(r)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from delivery.kernels import rms_norm
from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.targets import why_not_cpu


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, H], weight [H] → (y [T, H], r [T, H]), both in x's dtype.

    The norm reads r as it is stored, so that the fused form equals the two separate steps.
    """
    total = x + residual
    return rms_norm.reference(total, weight, eps, plus_one), total


def _cpu(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm.OP(total, weight, eps, plus_one, backend="cpu"), total


def _triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    from delivery.kernels.gpu.norms import add_rms_norm

    return add_rms_norm(x, residual, weight, eps, plus_one)


def _cases() -> Iterator[Case]:
    for hidden in rms_norm.HIDDEN_SIZES:

        def make(device: torch.device, dtype: torch.dtype, seed: int, h: int = hidden) -> tuple[object, ...]:
            x, weight = rms_norm.norm_inputs(device, dtype, seed, h)
            residual, _ = rms_norm.norm_inputs(device, dtype, seed + 1, h)
            return x, residual, weight, 1e-5

        yield Case(f"h{hidden}", make, rms_norm.NORM_TOLERANCE)


OP = Op(
    name="add_rms_norm",
    reference=reference,
    backends={"cpu": Backend(_cpu, why_not_cpu), "triton": Backend(_triton, rms_norm.why_not)},
    cases=_cases,
)
