"""Mixture of experts: every token through its chosen experts' gated MLPs, summed by routing weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.silu_mul import ACTIVATIONS
from delivery.kernels.silu_mul import reference as activate
from delivery.kernels.targets import why_not_cpu, why_not_triton


def reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routing: torch.Tensor,
    experts: torch.Tensor,
    activation: str = "silu",
) -> torch.Tensor:
    """x [T, H] → [T, H] in its dtype; formed in float32, or in float64 if x is.

    gate_up: [E, 2I, H], gate rows first. down: [E, H, I]. routing: float [T, k], weight of each chosen
    expert. experts: int64 [T, k], distinct in a row. activation as in `silu_mul`.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(x.shape, dtype=work, device=x.device)
    for expert in experts.unique().tolist():
        token, slot = (experts == expert).nonzero(as_tuple=True)
        hidden = activate(x[token].to(work) @ gate_up[expert].to(work).t(), activation)
        share = routing[token, slot].to(work)[:, None]
        out.index_add_(0, token, share * (hidden @ down[expert].to(work).t()))
    return out.to(x.dtype)


def _triton(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routing: torch.Tensor,
    experts: torch.Tensor,
    activation: str = "silu",
) -> torch.Tensor:
    from delivery.kernels.gpu.moe import fused_moe

    return fused_moe(x, gate_up, down, routing, experts, activation)


def _why_not_triton(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routing: torch.Tensor,
    experts: torch.Tensor,
    activation: str = "silu",
) -> str | None:
    if activation not in ACTIVATIONS:
        return f"unknown activation {activation!r}"
    if x.stride(1) != 1 or not gate_up.is_contiguous() or not down.is_contiguous():
        return "rows of x or the experts' weights are not contiguous"
    return why_not_triton(x)


# Hidden activations are rounded to the dtype of x between the two products.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def _cases() -> Iterator[Case]:
    shapes = (
        ("one-token", 1, 64, 96, 4, 2),
        ("odd", 7, 40, 33, 3, 2),
        ("some-idle", 5, 64, 48, 16, 2),
        ("many", 70, 48, 80, 4, 3),
        ("top-1", 9, 32, 32, 4, 1),
    )
    for name, tokens, hidden, inner, count, chosen in shapes:

        def make(
            device: torch.device,
            dtype: torch.dtype,
            seed: int,
            tokens: int = tokens,
            hidden: int = hidden,
            inner: int = inner,
            count: int = count,
            chosen: int = chosen,
        ) -> tuple[object, ...]:
            generator = torch.Generator("cpu").manual_seed(seed)
            x = torch.randn(tokens, hidden, generator=generator)
            gate_up = torch.randn(count, 2 * inner, hidden, generator=generator) * hidden**-0.5
            down = torch.randn(count, hidden, inner, generator=generator) * inner**-0.5
            scores = torch.rand(tokens, count, generator=generator)
            routing, experts = scores.softmax(-1).topk(chosen)
            floats = (t.to(device, dtype) for t in (x, gate_up, down, routing))
            return (*floats, experts.to(device))

        yield Case(name, make, TOLERANCE)


OP = Op(
    name="fused_moe",
    reference=reference,
    backends={"cpu": Backend(reference, why_not_cpu), "triton": Backend(_triton, _why_not_triton)},
    cases=_cases,
)
