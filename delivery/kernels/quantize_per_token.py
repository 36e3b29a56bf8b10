"""Activations to 8 bits, one scale a row: scale = absmax / Q_MAX (dynamic), or a fixed scale (static)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.row_quant import Q_MAX, quantize_rows, why_not_dtype
from delivery.kernels.targets import why_not_cpu, why_not_triton
from delivery.kernels.w8_rules import why_not_dtype_here


def reference(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] → (q [T, K] in `dtype`, scale float32 [T, 1]).

    dtype: int8 (rounds half to even), float8_e4m3fn or float8_e5m2 (casts). scale: float32 [1] to use for
    every row instead; it is returned as it is and values beyond it saturate. float64 x gives float64 scales.
    """
    if scale is None:
        return quantize_rows(x, dtype)
    work = torch.promote_types(x.dtype, torch.float32)
    q_max = Q_MAX[dtype]
    scaled = (x.to(work) / scale.to(work)).clamp(-q_max, q_max)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def _triton(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    from delivery.kernels.gpu.quantize import quantize_rows as launch

    return launch(x, dtype, scale)


def _why_not_triton(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None) -> str | None:
    if x.ndim != 2 or x.stride(1) != 1:
        return "x is not two-dimensional with contiguous rows"
    return why_not_dtype(dtype) or why_not_triton(x) or why_not_dtype_here(dtype, x.device)


def tolerance(dtype: torch.dtype) -> dict[torch.dtype, float]:
    """What one value in a few hundred may cost that falls to the neighbouring step of `dtype`.

    bf16 rows meet exact ties often; the float32 scale of a kernel and the float64 scale of the reference
    then round them apart. A step is 1/127 of the largest value in int8, 1/8 and 1/4 of the value in fp8.
    """
    allowed = {torch.int8: 2e-3, torch.float8_e4m3fn: 1.5e-2, torch.float8_e5m2: 3e-2}[dtype]
    return dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), allowed)


def _cases() -> Iterator[Case]:
    for dtype8 in Q_MAX:
        for rows, k, fixed in ((1, 4096, False), (7, 576, False), (3, 131, True), (2, 14336, False)):

            def make(
                device: torch.device,
                dtype: torch.dtype,
                seed: int,
                rows: int = rows,
                k: int = k,
                fixed: bool = fixed,
                dtype8: torch.dtype = dtype8,
            ) -> tuple[object, ...]:
                generator = torch.Generator("cpu").manual_seed(seed)
                x = torch.randn(rows, k, generator=generator).to(device, dtype)
                scale = torch.tensor([2.5 / Q_MAX[dtype8]], device=device) if fixed else None
                return (x, dtype8) if scale is None else (x, dtype8, scale)

            yield Case(f"{str(dtype8).removeprefix('torch.')}-{rows}x{k}", make, tolerance(dtype8))


OP = Op(
    name="quantize_per_token",
    reference=reference,
    backends={"cpu": Backend(reference, why_not_cpu), "triton": Backend(_triton, _why_not_triton)},
    cases=_cases,
)
