"""Gated activation of the MLP, act(gate) · up, over a fused [gate | up] projection (arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.targets import why_not_cpu, why_not_triton

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def reference(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """gate_up [T, 2I], gate first → [T, I] in its dtype; formed in float32, or in float64 if it is.

    activation: 'silu', 'gelu' (exact) or 'gelu_tanh'.
    """
    work = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(work).chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)


def _triton(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    from delivery.kernels.gpu.activation import silu_mul

    return silu_mul(gate_up, activation)


def why_not(gate_up: torch.Tensor, activation: str = "silu") -> str | None:
    """Why the Triton kernels cannot take this call."""
    if activation not in ACTIVATIONS:
        return f"unknown activation {activation!r}"
    return why_not_triton(gate_up)


TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
INTERMEDIATE_SIZES = (48, 1536, 14336)


def gate_up_inputs(device: torch.device, dtype: torch.dtype, seed: int, features: int) -> torch.Tensor:
    """Random [5, 2 · features]."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return (torch.randn(5, 2 * features, generator=generator) * 3).to(device, dtype)


def _cases() -> Iterator[Case]:
    for activation in ACTIVATIONS:
        for features in INTERMEDIATE_SIZES:

            def make(
                device: torch.device, dtype: torch.dtype, seed: int, n: int = features, act: str = activation
            ) -> tuple[object, ...]:
                return gate_up_inputs(device, dtype, seed, n), act

            yield Case(f"{activation}-{features}", make, TOLERANCE)


OP = Op(
    name="silu_mul",
    reference=reference,
    backends={"cpu": Backend(reference, why_not_cpu), "triton": Backend(_triton, why_not)},
    cases=_cases,
)
