"""Linear layer of 8-bit weights and 8-bit activations: y = (xq · wqᵀ) · s_x · s_w + b + residual.

int8 sums are exact (int32). Xiao et al. 2022 (SmoothQuant, arXiv:2211.10438) for the scheme.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from delivery.kernels import tuning
from delivery.kernels.hopper_rules import rule, why_not_hopper
from delivery.kernels.linear_w8a8_cases import cases
from delivery.kernels.op import Backend, Op
from delivery.kernels.quantize_per_token import OP as QUANTIZE
from delivery.kernels.targets import why_not_cpu, why_not_triton
from delivery.kernels.tuning import Choice, Tile
from delivery.kernels.w8_layout import PackedW8, pack, why_not_pack
from delivery.kernels.w8_rules import why_not_dtype_here

__all__ = ["OP", "PackedW8", "candidates", "pack", "reference", "run", "table_name", "why_not_pack"]

Optional = torch.Tensor | None


def reference(
    x: torch.Tensor,
    packed: PackedW8,
    bias: Optional = None,
    residual: Optional = None,
    x_scale: Optional = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """x [M, K] → [M, N].

    x: float, quantised here (each row, or by `packed.input_scale`) and answered in its dtype; or already
    quantised to the weight's dtype, with x_scale float32 [M, 1] or [1], and answered in `out_dtype`.
    bias [N] and residual [M, N] are added in float32. Everything is float64 if x or x_scale is.
    """
    if x_scale is None:
        out_dtype = x.dtype
        x, x_scale = QUANTIZE.reference(x, packed.weight.dtype, packed.input_scale)
    work = torch.float64 if torch.float64 in (x_scale.dtype, out_dtype) else torch.float32
    y = x.to(work) * x_scale.to(work) @ packed.dequantize(work).t()
    y = y if bias is None else y + bias.to(work)
    y = y if residual is None else y + residual.to(work)
    return y if work == torch.float64 else y.to(out_dtype)


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
        x, x_scale, out_dtype = _quantised(x, packed, x_scale, out_dtype)
        return _hopper_with(x, packed, bias, None, x_scale, out_dtype, choice.tile)
    result: torch.Tensor = OP(x, packed, bias, None, x_scale, out_dtype, backend=choice.backend)
    return result


def candidates(n: int, k: int, rows: int, dtype: torch.dtype) -> Iterator[Choice]:
    """Choices worth measuring for a weight [n, k] of `dtype` and `rows` rows."""
    for tile in _few_rows(n, k, rows) if rows <= 64 else _many_rows(n, rows):
        yield Choice("hopper", tile)
    if dtype == torch.float8_e4m3fn:
        yield Choice("scaled_mm")
    elif dtype == torch.int8 and rows > 16:
        yield Choice("int_mm")


def _few_rows(n: int, k: int, rows: int) -> Iterator[Tile]:
    steps = -(-k // 128)
    block_m = next(b for b in (8, 16, 32, 64) if rows <= b)
    for block_n, warps in ((64, 4), (128, 8)):
        for splits in (1, 2, 3, 4, 6, 8):
            if splits == 1 or (steps // splits >= 4 and n // block_n * splits <= 600):
                for stages in (4, 6, 8):
                    yield Tile(block_n, block_m, warps, stages, splits)


def _many_rows(n: int, rows: int) -> Iterator[Tile]:
    shapes = [(128, 128, 4, 3), (128, 128, 8, 4), (256, 128, 8, 4), (128, 256, 8, 4), (64, 128, 4, 4)]
    for block_n, block_m, warps, stages in shapes:
        tiles = -(-n // block_n) * -(-rows // block_m)
        for splits in (1, 2, 3, 4):
            if splits == 1 or tiles * splits <= 320:
                for group_m in (4, 16) if rows > 512 else (16,):
                    yield Tile(block_n, block_m, warps, stages, splits, group_m=group_m)


def _quantised(
    x: torch.Tensor, packed: PackedW8, x_scale: Optional, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    if x_scale is not None:
        return x, x_scale, out_dtype
    values, scale = QUANTIZE(x, packed.weight.dtype, packed.input_scale)
    return values, scale, x.dtype


def _hopper_with(
    x: torch.Tensor,
    packed: PackedW8,
    bias: Optional,
    residual: Optional,
    x_scale: torch.Tensor,
    out_dtype: torch.dtype,
    tile: Tile,
) -> torch.Tensor:
    from delivery.kernels.gpu.stream_hopper import product

    return product(
        x,
        packed.weight,
        tile,
        out_dtype,
        w_scale=packed.scale,
        blocks=packed.blocks,
        x_scale=x_scale,
        bias=bias,
        residual=residual,
        resident=packed.resident,
    )


def _hopper(
    x: torch.Tensor,
    packed: PackedW8,
    bias: Optional = None,
    residual: Optional = None,
    x_scale: Optional = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    x, x_scale, out_dtype = _quantised(x, packed, x_scale, out_dtype)
    n, k = packed.shape
    choice = tuning.choice_for(table_name(packed), n, k, x.shape[0])
    tile = choice.tile if choice is not None else None
    if tile is None:
        tile = rule(n, -(-k // 128), x.shape[0], x.device)
    return _hopper_with(x, packed, bias, residual, x_scale, out_dtype, tile)


def _triton(
    x: torch.Tensor,
    packed: PackedW8,
    bias: Optional = None,
    residual: Optional = None,
    x_scale: Optional = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    from delivery.kernels.gpu.w8_portable import product

    x, x_scale, out_dtype = _quantised(x, packed, x_scale, out_dtype)
    return product(
        x,
        packed.weight,
        packed.scale,
        packed.blocks,
        out_dtype,
        x_scale=x_scale,
        bias=bias,
        residual=residual,
    )


def _scaled_mm(
    x: torch.Tensor,
    packed: PackedW8,
    bias: Optional = None,
    residual: Optional = None,
    x_scale: Optional = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    x, x_scale, out_dtype = _quantised(x, packed, x_scale, out_dtype)
    y = torch._scaled_mm(
        x,
        packed.weight.t(),
        scale_a=x_scale.expand(x.shape[0], 1).contiguous(),
        scale_b=packed.scale.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    y = y if bias is None else y + bias
    return (y if residual is None else y + residual).to(out_dtype)


def _int_mm(
    x: torch.Tensor,
    packed: PackedW8,
    bias: Optional = None,
    residual: Optional = None,
    x_scale: Optional = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    from delivery.kernels.gpu.w8_portable import finish

    x, x_scale, out_dtype = _quantised(x, packed, x_scale, out_dtype)
    sums = torch._int_mm(x, packed.weight.t())
    return finish(sums, packed.scale, x_scale, out_dtype, bias, residual)


def table_name(packed: PackedW8) -> str:
    """What the tuning table calls this operator for a weight of this type."""
    return "linear_w8a8_int8" if packed.weight.dtype == torch.int8 else "linear_w8a8_fp8"


def _why_not_hopper(x: torch.Tensor, packed: PackedW8, *_args: object, **_kwargs: object) -> str | None:
    if packed.shape[1] % 16:
        return f"K = {packed.shape[1]} is not a multiple of 16"
    return why_not_hopper(x, packed.weight)


def _why_not_triton(x: torch.Tensor, packed: PackedW8, *_args: object, **_kwargs: object) -> str | None:
    if x.stride(1) != 1:
        return "rows of x are not contiguous"
    return why_not_triton(x) or why_not_dtype_here(packed.weight.dtype, x.device)


def _why_not_scaled_mm(x: torch.Tensor, packed: PackedW8, *_args: object, **_kwargs: object) -> str | None:
    if x.device.type != "cuda":
        return f"the tensor is on {x.device}"
    if packed.weight.dtype != torch.float8_e4m3fn:
        return f"torch has no product of two {packed.weight.dtype} matrices here"
    if packed.blocks:
        return "128-block scales are not taken"
    if packed.shape[0] % 16 or packed.shape[1] % 16:
        return f"{packed.shape[0]} x {packed.shape[1]} is not a multiple of 16 in both"
    return why_not_dtype_here(packed.weight.dtype, x.device)


def _why_not_int_mm(x: torch.Tensor, packed: PackedW8, *_args: object, **_kwargs: object) -> str | None:
    if x.device.type != "cuda":
        return f"the tensor is on {x.device}"
    if packed.weight.dtype != torch.int8:
        return f"the weight is {packed.weight.dtype}, not int8"
    if x.shape[0] <= 16 or packed.shape[0] % 8 or packed.shape[1] % 8:
        return "torch._int_mm takes more than 16 rows, and N and K in multiples of 8"
    return why_not_triton(x) or why_not_dtype_here(torch.int8, x.device)


def _preferred(x: torch.Tensor, packed: PackedW8, *_args: object, **_kwargs: object) -> str | None:
    choice = tuning.choice_for(table_name(packed), *packed.shape, x.shape[0])
    return None if choice is None else choice.backend


OP = Op(
    name="linear_w8a8",
    reference=reference,
    backends={
        "cpu": Backend(reference, why_not_cpu),
        "hopper": Backend(_hopper, _why_not_hopper),
        "scaled_mm": Backend(_scaled_mm, _why_not_scaled_mm),
        "triton": Backend(_triton, _why_not_triton),
        "int_mm": Backend(_int_mm, _why_not_int_mm),
    },
    cases=cases,
    preferred=_preferred,
)
