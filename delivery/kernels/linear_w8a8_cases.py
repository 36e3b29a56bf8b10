"""Inputs on which the 8-bit linear layers are checked."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from delivery.kernels.op import Case
from delivery.kernels.row_quant import Q_MAX, quantize_rows
from delivery.kernels.w8_layout import BLOCK, PackedW8


def tolerance(dtype: torch.dtype) -> dict[torch.dtype, float]:
    """Allowed relative error: one rounding of the answer, and values of x that tie between two steps.

    fp8 sums in the tensor cores keep about 14 bits besides.
    """
    allowed = {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 6e-3}
    return {kind: max(error, _TIES[dtype]) for kind, error in allowed.items()}


_TIES = {torch.int8: 1e-3, torch.float8_e4m3fn: 1.5e-2, torch.float8_e5m2: 3e-2}


def random_packed(n: int, k: int, dtype: torch.dtype, seed: int, *, blocks: bool = False) -> PackedW8:
    """A random weight [n, k], scaled per channel or per 128-block."""
    generator = torch.Generator("cpu").manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * 0.02
    if not blocks:
        return PackedW8(*quantize_rows(weight, dtype))
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    scale = (torch.rand(rows, columns, generator=generator) + 0.5) * 1e-4
    q_max = Q_MAX[dtype]
    wide = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return PackedW8((weight / wide).clamp(-q_max, q_max).to(dtype), scale, blocks=True)


def moved(packed: PackedW8, device: torch.device) -> PackedW8:
    """The same weight on a device."""
    fixed = None if packed.input_scale is None else packed.input_scale.to(device)
    return PackedW8(packed.weight.to(device), packed.scale.to(device), packed.blocks, fixed, packed.resident)


def cases() -> Iterator[Case]:
    """int8 and both fp8 forms; dynamic, fixed and given scales; blocks; odd sizes; bias and residual."""
    shapes = (
        ("one-row", 1, 192, 256, False, False),
        ("rows", 19, 320, 144, False, True),
        ("odd", 5, 71, 77, False, True),
        ("blocks", 7, 200, 272, True, False),
        ("many-rows", 130, 136, 160, False, True),
    )
    for dtype8 in Q_MAX:
        for name, m, n, k, blocks, extras in shapes:
            if blocks and dtype8 == torch.int8:
                continue

            def make(
                device: torch.device,
                dtype: torch.dtype,
                seed: int,
                m: int = m,
                n: int = n,
                k: int = k,
                blocks: bool = blocks,
                extras: bool = extras,
                dtype8: torch.dtype = dtype8,
            ) -> tuple[object, ...]:
                generator = torch.Generator("cpu").manual_seed(seed + 1)
                x = torch.randn(m, k, generator=generator).to(device, dtype)
                packed = moved(random_packed(n, k, dtype8, seed, blocks=blocks), device)
                if not extras:
                    return x, packed
                bias = torch.randn(n, generator=generator).to(device, dtype)
                residual = torch.randn(m, n, generator=generator).to(device, dtype)
                return x, packed, bias, residual

            yield Case(f"{name}-{str(dtype8).removeprefix('torch.')}", make, tolerance(dtype8))

        def given(
            device: torch.device, dtype: torch.dtype, seed: int, dtype8: torch.dtype = dtype8
        ) -> tuple[object, ...]:
            generator = torch.Generator("cpu").manual_seed(seed + 1)
            values, scale = quantize_rows(torch.randn(20, 96, generator=generator), dtype8)
            packed = moved(random_packed(64, 96, dtype8, seed), device)
            return values.to(device), packed, None, None, scale.to(device), dtype

        yield Case(f"quantised-x-{str(dtype8).removeprefix('torch.')}", given, tolerance(dtype8))

        def fixed(
            device: torch.device, dtype: torch.dtype, seed: int, dtype8: torch.dtype = dtype8
        ) -> tuple[object, ...]:
            generator = torch.Generator("cpu").manual_seed(seed + 1)
            x = torch.randn(6, 128, generator=generator).to(device, dtype)
            packed = random_packed(96, 128, dtype8, seed)
            scale = torch.tensor([3.0 / Q_MAX[dtype8]])
            return x, moved(PackedW8(packed.weight, packed.scale, input_scale=scale), device)

        yield Case(f"fixed-scale-{str(dtype8).removeprefix('torch.')}", fixed, tolerance(dtype8))
