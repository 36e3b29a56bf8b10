"""Gate and up projections in 8 bits with their activation: y = silu(x · gateᵀ) · (x · upᵀ).

The weight's rows are gates and ups in turns of eight (`w8_layout.pack_gated`), so that both sums of a feature
meet in one thread of the product, and neither is written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from delivery.kernels import linear_w8a8, tuning
from delivery.kernels.hopper_rules import rule, why_not_hopper
from delivery.kernels.linear_w8a8_cases import moved, random_packed, tolerance
from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.quantize_per_token import OP as QUANTIZE
from delivery.kernels.row_quant import quantize_rows
from delivery.kernels.targets import why_not_cpu, why_not_triton
from delivery.kernels.tuning import Choice, Tile
from delivery.kernels.w8_layout import TURN, PackedW8

Optional = torch.Tensor | None


def reference(
    x: torch.Tensor,
    packed: PackedW8,
    bias: Optional = None,
    x_scale: Optional = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """x [M, K], packed [2 I, K] and bias [2 I] in turns → [M, I]; x, x_scale and dtypes as `linear_w8a8`."""
    out_dtype = x.dtype if x_scale is None else out_dtype
    work = torch.float64 if torch.float64 in (x.dtype, out_dtype) else torch.float32
    if x_scale is None:
        y = linear_w8a8.reference(x.to(work), packed, bias)
    else:
        y = linear_w8a8.reference(x, packed, bias, None, x_scale, work)
    both = y.view(len(y), -1, 2, TURN)
    inner = functional.silu(both[:, :, 0]) * both[:, :, 1]
    return inner.flatten(1).to(out_dtype)


def table_name(packed: PackedW8) -> str:
    """What the tuning table calls this operator for a weight of this type."""
    return linear_w8a8.table_name(packed) + "_gated"


def candidates(n: int, k: int, rows: int, dtype: torch.dtype) -> Iterator[Choice]:
    """Choices worth measuring: the tiles of the product alone."""
    yield from (choice for choice in linear_w8a8.candidates(n, k, rows, dtype) if choice.tile is not None)


def run(
    x: torch.Tensor,
    packed: PackedW8,
    bias: Optional,
    choice: Choice,
    x_scale: Optional = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """One measured choice: its backend with its tile."""
    if choice.backend == "hopper" and choice.tile is not None:
        return _hopper_with(x, packed, bias, x_scale, out_dtype, choice.tile)
    result: torch.Tensor = OP(x, packed, bias, x_scale, out_dtype, backend=choice.backend)
    return result


def _hopper_with(
    x: torch.Tensor,
    packed: PackedW8,
    bias: Optional,
    x_scale: Optional,
    out_dtype: torch.dtype,
    tile: Tile,
) -> torch.Tensor:
    from delivery.kernels.gpu.stream_hopper import product

    if x_scale is None:
        out_dtype = x.dtype
        x, x_scale = QUANTIZE(x, packed.weight.dtype, packed.input_scale)
    return product(
        x,
        packed.weight,
        tile,
        out_dtype,
        w_scale=packed.scale,
        x_scale=x_scale,
        bias=bias,
        gated=True,
        resident=packed.resident,
    )


def _hopper(
    x: torch.Tensor,
    packed: PackedW8,
    bias: Optional = None,
    x_scale: Optional = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    n, k = packed.shape
    choice = tuning.choice_for(table_name(packed), n, k, x.shape[0])
    if choice is None:  # tiles are chosen by the product, the activation hardly matters to them
        choice = tuning.choice_for(linear_w8a8.table_name(packed), n, k, x.shape[0])
    tile = choice.tile if choice is not None else None
    if tile is None:
        tile = rule(n, -(-k // 128), x.shape[0], x.device)
    return _hopper_with(x, packed, bias, x_scale, out_dtype, tile)


def _triton(
    x: torch.Tensor,
    packed: PackedW8,
    bias: Optional = None,
    x_scale: Optional = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    from delivery.kernels.gpu.activation import silu_mul

    y = linear_w8a8.OP(x, packed, bias, None, x_scale, out_dtype, backend="triton")
    return silu_mul(y, "silu", in_turns=True)


def _why_not(packed: PackedW8) -> str | None:
    if packed.blocks:
        return "128-block scales do not stay whole when rows take turns"
    if packed.shape[0] % (2 * TURN):
        return f"{packed.shape[0]} rows are not turns of {TURN} gates and {TURN} ups"
    return None


def _why_not_hopper(x: torch.Tensor, packed: PackedW8, *_args: object, **_kwargs: object) -> str | None:
    if packed.shape[1] % 16:
        return f"K = {packed.shape[1]} is not a multiple of 16"
    return _why_not(packed) or why_not_hopper(x, packed.weight)


def _why_not_triton(x: torch.Tensor, packed: PackedW8, *_args: object, **_kwargs: object) -> str | None:
    return _why_not(packed) or why_not_triton(x)


def _preferred(x: torch.Tensor, packed: PackedW8, *_args: object, **_kwargs: object) -> str | None:
    choice = tuning.choice_for(table_name(packed), *packed.shape, x.shape[0])
    return None if choice is None else choice.backend


def _cases() -> Iterator[Case]:
    shapes = (
        ("one-row", 1, 192, 256, False),
        ("rows", 19, 320, 144, True),
        ("edges", 9, 208, 112, False),
        ("many-rows", 130, 144, 160, True),
        ("many-tiles", 300, 784, 384, False),
    )
    for dtype8 in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        for name, m, n, k, with_bias in shapes:

            def make(
                device: torch.device,
                dtype: torch.dtype,
                seed: int,
                m: int = m,
                n: int = n,
                k: int = k,
                with_bias: bool = with_bias,
                dtype8: torch.dtype = dtype8,
            ) -> tuple[object, ...]:
                generator = torch.Generator("cpu").manual_seed(seed + 1)
                values, scale = quantize_rows(torch.randn(m, k, generator=generator) * 4, dtype8)
                packed = moved(random_packed(n, k, dtype8, seed), device)
                bias = torch.randn(n, generator=generator).to(device, dtype) if with_bias else None
                return values.to(device), packed, bias, scale.to(device), dtype

            yield Case(f"{name}-{str(dtype8).removeprefix('torch.')}", make, tolerance(dtype8))


OP = Op(
    name="linear_w8a8_gated",
    reference=reference,
    backends={
        "cpu": Backend(reference, why_not_cpu),
        "hopper": Backend(_hopper, _why_not_hopper),
        "triton": Backend(_triton, _why_not_triton),
    },
    cases=_cases,
    preferred=_preferred,
)
