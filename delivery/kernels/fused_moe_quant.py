"""Mixture of experts as `fused_moe`, weights in 4 or 8 bits, activations as they are or in 8 bits too."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from delivery.kernels import fused_moe
from delivery.kernels.expert_layout import PackedExperts, pack
from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.row_quant import quantize_rows
from delivery.kernels.silu_mul import ACTIVATIONS
from delivery.kernels.silu_mul import reference as activate
from delivery.kernels.targets import why_not_cpu, why_not_triton
from delivery.kernels.w8_rules import why_not_dtype_here
from delivery.qtensor import QTensor


def reference(
    x: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    routing: torch.Tensor,
    experts: torch.Tensor,
    activation: str = "silu",
) -> torch.Tensor:
    """x [T, H] → [T, H] in its dtype; formed in float32, or in float64 if x is. As `fused_moe`, gate_up
    [E, 2I, H] and down [E, H, I] packed. What enters a layer whose `act_dtype` is set is rounded to it."""
    work = torch.promote_types(x.dtype, torch.float32)
    wide = gate_up.dequantize(work), down.dequantize(work)
    if gate_up.act_dtype is None:
        return fused_moe.reference(x.to(work), wide[0], wide[1], routing, experts, activation).to(x.dtype)
    rounded = _rounded(x.to(work), gate_up.act_dtype)
    out = torch.zeros_like(rounded)
    for expert in experts.unique().tolist():
        token, slot = (experts == expert).nonzero(as_tuple=True)
        inner = activate(rounded[token] @ wide[0][expert].t(), activation)
        made = _rounded(inner, gate_up.act_dtype) @ wide[1][expert].t()
        out.index_add_(0, token, routing[token, slot].to(work)[:, None] * made)
    return out.to(x.dtype)


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values, scale = quantize_rows(x, dtype)
    return values.to(x.dtype) * scale.to(x.dtype)


def _triton(
    x: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    routing: torch.Tensor,
    experts: torch.Tensor,
    activation: str = "silu",
) -> torch.Tensor:
    from delivery.kernels.gpu.moe import fused_moe_quant

    return fused_moe_quant(x, gate_up, down, routing, experts, activation)


def _why_not_triton(
    x: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    routing: torch.Tensor,
    experts: torch.Tensor,
    activation: str = "silu",
) -> str | None:
    if activation not in ACTIVATIONS:
        return f"unknown activation {activation!r}"
    if x.stride(1) != 1:
        return "rows of x are not contiguous"
    if gate_up.act_dtype != down.act_dtype:
        return "gate and up take other activations than down"
    reason = why_not_triton(x)
    return reason or (why_not_dtype_here(gate_up.values.dtype, x.device) if gate_up.bits == 8 else None)


# Hidden activations are rounded to the dtype of x between the two products, and values that tie fall apart.
TOLERANCE = {torch.float32: 5e-3, torch.float16: 6e-3, torch.bfloat16: 2.5e-2}
_FP8 = dict.fromkeys(TOLERANCE, 4e-2)


def _cases() -> Iterator[Case]:
    kinds = ("w4-zeros", "w4-symmetric", "w8", "int8", "fp8")
    shapes = (("one-token", 1, 64, 128, 4, 2), ("odd", 7, 128, 64, 3, 2), ("many", 70, 64, 192, 4, 3))
    for kind in kinds:
        for name, tokens, hidden, inner, count, chosen in shapes:

            def make(
                device: torch.device,
                dtype: torch.dtype,
                seed: int,
                kind: str = kind,
                tokens: int = tokens,
                hidden: int = hidden,
                inner: int = inner,
                count: int = count,
                chosen: int = chosen,
            ) -> tuple[object, ...]:
                generator = torch.Generator("cpu").manual_seed(seed)
                x = torch.randn(tokens, hidden, generator=generator)
                gate_up = [random_weight(kind, 2 * inner, hidden, generator, device) for _ in range(count)]
                down = [random_weight(kind, hidden, inner, generator, device) for _ in range(count)]
                scores = torch.rand(tokens, count, generator=generator)
                routing, experts = scores.softmax(-1).topk(chosen)
                packed = (pack(gate_up), pack(down))
                return x.to(device, dtype), *packed, routing.to(device, dtype), experts.to(device)

            yield Case(f"{kind}-{name}", make, _FP8 if kind == "fp8" else TOLERANCE)


def random_weight(
    kind: str, rows: int, columns: int, generator: torch.Generator, device: torch.device
) -> QTensor:
    """A random QTensor [rows, columns] in one of the ways of quantising that are packed."""
    weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
    if kind in ("w8", "int8", "fp8"):
        dtype = torch.float8_e4m3fn if kind == "fp8" else torch.int8
        values, scale = quantize_rows(weight, dtype)
        return QTensor(values, scale, None, -1, 8, act_dtype=None if kind == "w8" else dtype).to(device)
    shape = rows, columns // 64
    scale = (torch.rand(shape, generator=generator) + 0.5) * columns**-0.5 / 4
    values = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    if kind == "w4-symmetric":
        return QTensor((values.to(torch.int8) - 8), scale.half(), None, 64, 4).to(device)
    zero_point = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    return QTensor(values, scale.half(), zero_point, 64, 4).to(device)


OP = Op(
    name="fused_moe_quant",
    reference=reference,
    backends={"cpu": Backend(reference, why_not_cpu), "triton": Backend(_triton, _why_not_triton)},
    cases=_cases,
)
