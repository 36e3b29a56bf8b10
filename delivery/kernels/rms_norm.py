"""RMSNorm: y = x / sqrt(mean(x²) + eps) · w  (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.targets import why_not_cpu, why_not_triton

MAX_HIDDEN = 16384
"""Features of a row that one program of the fused kernels holds in registers."""


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False) -> torch.Tensor:
    """x [..., H], weight [H] → [..., H] in x's dtype; formed in float32, or in float64 if x is.

    plus_one multiplies by 1 + w, as Gemma stores its weights.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(work)
    factor = weight.to(work) + 1 if plus_one else weight.to(work)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * factor).to(x.dtype)


def _cpu(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False) -> torch.Tensor:
    if x.dtype not in (torch.float32, torch.float64):
        return reference(x, weight, eps, plus_one)
    return torch.rms_norm(x, (x.shape[-1],), weight + 1 if plus_one else weight, eps)


def _triton(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False) -> torch.Tensor:
    from delivery.kernels.gpu.norms import rms_norm

    return rms_norm(x, weight, eps, plus_one)


def why_not(x: torch.Tensor, *_args: object, **_kwargs: object) -> str | None:
    """Why the Triton norms cannot take x."""
    if x.shape[-1] > MAX_HIDDEN:
        return f"{x.shape[-1]} features a row are more than {MAX_HIDDEN}"
    return why_not_triton(x)


NORM_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
HIDDEN_SIZES = (64, 576, 4096, 5120)


def _cases() -> Iterator[Case]:
    for hidden in HIDDEN_SIZES:
        for plus_one in (False, True):

            def make(
                device: torch.device, dtype: torch.dtype, seed: int, h: int = hidden, one: bool = plus_one
            ) -> tuple[object, ...]:
                x, weight = norm_inputs(device, dtype, seed, h)
                return x, weight, 1e-5, one

            yield Case(f"h{hidden}{'+1' if plus_one else ''}", make, NORM_TOLERANCE)


def norm_inputs(
    device: torch.device, dtype: torch.dtype, seed: int, hidden: int, tokens: int = 5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random activations [tokens, hidden], with one channel 50 times the others, and a weight."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator)
    x[:, hidden // 3] *= 50
    weight = torch.rand(hidden, generator=generator) + 0.5
    return x.to(device, dtype), weight.to(device, dtype)


OP = Op(
    name="rms_norm",
    reference=reference,
    backends={"cpu": Backend(_cpu, why_not_cpu), "triton": Backend(_triton, why_not)},
    cases=_cases,
)
