"""Linear layer in 16 bits (or float32): y = x · wᵀ + b. cuBLAS, and a streaming kernel for few rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from delivery.kernels import tuning
from delivery.kernels.hopper_rules import rule, why_not_hopper
from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.targets import why_not_cpu
from delivery.kernels.tuning import Choice, Tile

__all__ = ["OP", "candidates", "pack", "reference", "run"]


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K], weight [N, K] → [M, N] in x's dtype; formed in float32, or in float64 if x is."""
    work = torch.promote_types(x.dtype, torch.float32)
    y = x.to(work) @ weight.to(work).t()
    return (y if bias is None else y + bias.to(work)).to(x.dtype)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The weight [N, K] with contiguous rows."""
    return weight.contiguous()


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, choice: Choice) -> torch.Tensor:
    """One measured choice: its backend with its tile."""
    if choice.backend == "hopper" and choice.tile is not None:
        return _hopper_with(x, weight, bias, choice.tile)
    result: torch.Tensor = OP(x, weight, bias, backend=choice.backend)
    return result


def candidates(n: int, k: int, rows: int) -> Iterator[Choice]:
    """Choices worth measuring for a weight [n, k] and `rows` rows."""
    yield Choice("cublas")
    if rows <= 64:
        block_m = next(b for b in (8, 16, 32, 64) if rows <= b)
        for splits in (1, 2, 4, 7):
            if splits == 1 or (k // 64 // splits >= 8 and n // 64 * splits <= 800):
                for stages in (4, 6):
                    yield Choice("hopper", Tile(64, block_m, 4, stages, splits))


def _hopper_with(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    from delivery.kernels.gpu.stream_hopper import product

    return product(x, weight, tile, x.dtype, bias=bias)


def _hopper(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    n, k = weight.shape
    choice = tuning.choice_for("linear_w16a16", n, k, x.shape[0])
    tile = choice.tile if choice is not None else None
    return _hopper_with(x, weight, bias, tile or rule(n, -(-k // 64), x.shape[0], x.device))


def _why_not_hopper(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    if x.dtype not in (torch.float16, torch.bfloat16) or weight.dtype != x.dtype:
        return f"operands are {x.dtype} and {weight.dtype}, not both fp16 or both bf16"
    return why_not_hopper(x, weight)


def _why_not_cublas(x: torch.Tensor, *_args: object, **_kwargs: object) -> str | None:
    return None if x.device.type == "cuda" else f"the tensor is on {x.device}"


def _preferred(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    choice = tuning.choice_for("linear_w16a16", weight.shape[0], weight.shape[1], x.shape[0])
    return None if choice is None else choice.backend


TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def _cases() -> Iterator[Case]:
    for m, n, k in ((1, 192, 256), (5, 71, 77), (33, 320, 136), (130, 96, 64)):

        def make(
            device: torch.device, dtype: torch.dtype, seed: int, m: int = m, n: int = n, k: int = k
        ) -> tuple[object, ...]:
            generator = torch.Generator("cpu").manual_seed(seed)
            x = torch.randn(m, k, generator=generator).to(device, dtype)
            weight = (torch.randn(n, k, generator=generator) * 0.05).to(device, dtype)
            return x, weight, torch.randn(n, generator=generator).to(device, dtype)

        yield Case(f"{m}x{n}x{k}", make, TOLERANCE)


OP = Op(
    name="linear_w16a16",
    reference=reference,
    backends={
        "cpu": Backend(functional.linear, why_not_cpu),
        "cublas": Backend(functional.linear, _why_not_cublas),
        "hopper": Backend(_hopper, _why_not_hopper),
    },
    cases=_cases,
    preferred=_preferred,
)
