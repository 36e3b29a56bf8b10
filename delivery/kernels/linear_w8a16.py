"""Linear layer of 8-bit weights and 16-bit activations: y = x · (wq · s_w)ᵀ + b."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from delivery.kernels import tuning
from delivery.kernels.linear_w8a8_cases import moved, random_packed
from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.targets import why_not_cpu, why_not_triton
from delivery.kernels.w8_layout import DTYPES, PackedW8, pack, why_not_pack
from delivery.kernels.w8_rules import why_not_dtype_here

__all__ = ["OP", "PackedW8", "pack", "reference", "why_not_pack"]

EXPAND_FROM_ROWS = 256
"""From here on a dense copy of the weight and cuBLAS win over expanding inside the product."""


def reference(x: torch.Tensor, packed: PackedW8, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] → [M, N] in its dtype; formed in float32, or in float64 if x is."""
    work = torch.promote_types(x.dtype, torch.float32)
    y = x.to(work) @ packed.dequantize(work).t()
    return (y if bias is None else y + bias.to(work)).to(x.dtype)


def _triton(x: torch.Tensor, packed: PackedW8, bias: torch.Tensor | None = None) -> torch.Tensor:
    from delivery.kernels.gpu.w8_portable import product

    return product(x, packed.weight, packed.scale, packed.blocks, x.dtype, bias=bias)


def _expand(x: torch.Tensor, packed: PackedW8, bias: torch.Tensor | None = None) -> torch.Tensor:
    return functional.linear(x, packed.dequantize(x.dtype), bias)


def _why_not_triton(x: torch.Tensor, packed: PackedW8, bias: torch.Tensor | None = None) -> str | None:
    if x.stride(1) != 1:
        return "rows of x are not contiguous"
    return why_not_triton(x) or why_not_dtype_here(packed.weight.dtype, x.device)


def _why_not_expand(x: torch.Tensor, packed: PackedW8, bias: torch.Tensor | None = None) -> str | None:
    return None if x.device.type == "cuda" else f"the tensor is on {x.device}"


def _preferred(x: torch.Tensor, packed: PackedW8, bias: torch.Tensor | None = None) -> str | None:
    choice = tuning.choice_for("linear_w8a16", *packed.shape, x.shape[0])
    if choice is not None:
        return choice.backend
    return "expand" if x.shape[0] >= EXPAND_FROM_ROWS and x.device.type == "cuda" else None


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 6e-3}


def _cases() -> Iterator[Case]:
    shapes = (("one-row", 1, 192, 256), ("odd", 5, 71, 77), ("rows", 33, 320, 144))
    for dtype8 in DTYPES:
        for name, m, n, k in (*shapes, ("blocks", 7, 200, 272)):
            if name == "blocks" and dtype8 == torch.int8:
                continue

            def make(
                device: torch.device,
                dtype: torch.dtype,
                seed: int,
                m: int = m,
                n: int = n,
                k: int = k,
                blocks: bool = name == "blocks",
                dtype8: torch.dtype = dtype8,
            ) -> tuple[object, ...]:
                generator = torch.Generator("cpu").manual_seed(seed + 1)
                x = torch.randn(m, k, generator=generator).to(device, dtype)
                bias = torch.randn(n, generator=generator).to(device, dtype)
                return x, moved(random_packed(n, k, dtype8, seed, blocks=blocks), device), bias

            yield Case(f"{name}-{str(dtype8).removeprefix('torch.')}", make, TOLERANCE)


OP = Op(
    name="linear_w8a16",
    reference=reference,
    backends={
        "cpu": Backend(_expand, why_not_cpu),
        "triton": Backend(_triton, _why_not_triton),
        "expand": Backend(_expand, _why_not_expand),
    },
    cases=_cases,
    preferred=_preferred,
)
