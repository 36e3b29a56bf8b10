"""Linear layer with 4-bit weights in groups and 16-bit activations: y = x · ((q − z) · s)ᵀ + b."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from delivery.kernels import tuning
from delivery.kernels.hopper_rules import rule, why_not_hopper
from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.targets import why_not_cpu, why_not_triton
from delivery.kernels.tuning import Choice, Tile
from delivery.kernels.w4_layout import PackedW4, pack, unpack, why_not_pack
from delivery.qtensor import QTensor

__all__ = ["OP", "PackedW4", "candidates", "pack", "reference", "run", "unpack", "why_not_pack"]

EXPAND_FROM_ROWS = 512
"""From here on, without the Hopper kernel, a dense copy of the weight and cuBLAS win."""


def reference(x: torch.Tensor, packed: PackedW4, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] → [M, N] in its dtype; formed in float32, or in float64 if x is."""
    work = torch.promote_types(x.dtype, torch.float32)
    y = x.to(work) @ unpack(packed).dequantize(work).t()
    return (y if bias is None else y + bias.to(work)).to(x.dtype)


def run(x: torch.Tensor, packed: PackedW4, bias: torch.Tensor | None, choice: Choice) -> torch.Tensor:
    """One measured choice: its backend with its tile."""
    if choice.backend == "hopper" and choice.tile is not None:
        return _hopper_with(x, packed, bias, choice.tile)
    result: torch.Tensor = OP(x, packed, bias, backend=choice.backend)
    return result


def candidates(n: int, k: int, rows: int) -> Iterator[Choice]:
    """Choices worth measuring for a weight [n, k] and `rows` rows."""
    for tile in _few_rows(n, k, rows) if rows <= 64 else _many_rows(n, k, rows):
        if tile.stages * (tile.block_n * 67 + tile.block_m * 256) < tuning.SHARED_BYTES - 4096:
            yield Choice("hopper", tile)
    if rows > 128:
        yield Choice("expand")


def _few_rows(n: int, k: int, rows: int) -> Iterator[Tile]:
    steps = -(-k // 128)
    block_m = next(b for b in (8, 16, 32, 64) if rows <= b)
    wide = block_m >= 32
    for block_n, warps in ((64, 4), (128, 8), (256, 8)) if wide else ((64, 4), (128, 8)):
        for splits in (1, 2, 3, 4, 5, 6, 7, 8):
            if splits == 1 or (steps // splits >= 4 and n // block_n * splits <= 600):
                for stages in (4, 6, 8):
                    for scale_weights in (True,) if wide else (False, True):
                        yield Tile(block_n, block_m, warps, stages, splits, scale_weights)


def _many_rows(n: int, k: int, rows: int) -> Iterator[Tile]:
    shapes = [(128, 128, 8, 4), (256, 128, 8, 3), (128, 256, 8, 3), (64, 128, 4, 3), (64, 256, 4, 3)]
    for block_n, block_m, warps, stages in shapes:
        tiles = -(-n // block_n) * -(-rows // block_m)
        for splits in (1, 2, 3, 4):
            if splits == 1 or tiles * splits <= 320:
                for group_m in (4, 16) if rows > 512 else (16,):
                    yield Tile(block_n, block_m, warps, stages, splits, True, group_m)


def _hopper_with(x: torch.Tensor, packed: PackedW4, bias: torch.Tensor | None, tile: Tile) -> torch.Tensor:
    from delivery.kernels.gpu.w4_hopper import product

    return product(_ordered(x, packed), packed, bias, tile)


def _hopper(x: torch.Tensor, packed: PackedW4, bias: torch.Tensor | None = None) -> torch.Tensor:
    n, k = packed.shape
    choice = tuning.choice_for("linear_w4a16", n, k, x.shape[0])
    tile = choice.tile if choice is not None else None
    if tile is None:
        tile = rule(n, packed.words.shape[1], x.shape[0], x.device, four_bit=True)
    return _hopper_with(x, packed, bias, tile)


def _expand(x: torch.Tensor, packed: PackedW4, bias: torch.Tensor | None = None) -> torch.Tensor:
    from delivery.kernels.gpu.w4_portable import expanded

    return functional.linear(_ordered(x, packed), expanded(packed, x.dtype), bias)


def _triton(x: torch.Tensor, packed: PackedW4, bias: torch.Tensor | None = None) -> torch.Tensor:
    from delivery.kernels.gpu.w4_portable import product

    return product(_ordered(x, packed), packed, bias)


def _cpu(x: torch.Tensor, packed: PackedW4, bias: torch.Tensor | None = None) -> torch.Tensor:
    return functional.linear(x, unpack(packed).dequantize(x.dtype), bias)


def _ordered(x: torch.Tensor, packed: PackedW4) -> torch.Tensor:
    return x if packed.order is None else x.index_select(1, packed.order)


def _why_not_hopper(x: torch.Tensor, packed: PackedW4, bias: torch.Tensor | None = None) -> str | None:
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"activations are {x.dtype}, not fp16 or bf16"
    return why_not_hopper(x)


def _why_not_triton(x: torch.Tensor, packed: PackedW4, bias: torch.Tensor | None = None) -> str | None:
    if x.stride(1) != 1:
        return "rows of x are not contiguous"
    return why_not_triton(x)


def _preferred(x: torch.Tensor, packed: PackedW4, bias: torch.Tensor | None = None) -> str | None:
    choice = tuning.choice_for("linear_w4a16", *packed.shape, x.shape[0])
    if choice is not None:
        return choice.backend
    if x.shape[0] >= EXPAND_FROM_ROWS and x.device.type == "cuda" and _why_not_hopper(x, packed):
        return "expand"
    return None


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def random_weight(
    n: int, k: int, group_size: int, *, zero_point: bool, act_order: bool, seed: int, scale: torch.dtype
) -> QTensor:
    """A random 4-bit weight, as a quantiser would return it."""
    generator = torch.Generator("cpu").manual_seed(seed)
    groups = 1 if group_size == -1 else -(-k // group_size)
    values = torch.randint(0, 16, (n, k), generator=generator)
    steps = (torch.rand(n, groups, generator=generator) + 0.5).mul_(0.01).to(scale)
    g_idx = None
    if act_order:
        g_idx = (torch.randperm(k, generator=generator) // group_size).to(torch.int32)
    if zero_point:
        zeros = torch.randint(0, 16, (n, groups), generator=generator).to(torch.uint8)
        return QTensor(values.to(torch.uint8), steps, zeros, group_size, 4, g_idx=g_idx)
    return QTensor((values - 8).to(torch.int8), steps, None, group_size, 4, g_idx=g_idx)


def _cases() -> Iterator[Case]:
    shapes = (
        ("one-row", 1, 320, 512, 128, True, False, False),
        ("symmetric", 5, 512, 256, 128, False, False, True),
        ("odd", 17, 71, 200, 64, True, False, True),
        ("small-groups", 33, 264, 384, 32, True, False, False),
        ("per-channel", 3, 130, 136, -1, True, False, False),
        ("act-order", 9, 96, 256, 64, True, True, True),
        ("many-rows", 70, 300, 264, 128, True, False, True),
    )
    for name, m, n, k, group_size, zero_point, act_order, with_bias in shapes:

        def make(
            device: torch.device,
            dtype: torch.dtype,
            seed: int,
            m: int = m,
            n: int = n,
            k: int = k,
            group_size: int = group_size,
            zero_point: bool = zero_point,
            act_order: bool = act_order,
            with_bias: bool = with_bias,
        ) -> tuple[object, ...]:
            generator = torch.Generator("cpu").manual_seed(seed)
            x = torch.randn(m, k, generator=generator).to(device, dtype)
            weight = random_weight(
                n, k, group_size, zero_point=zero_point, act_order=act_order, seed=seed, scale=torch.float16
            )
            bias = torch.randn(n, generator=generator).to(device, dtype) if with_bias else None
            return x, pack(weight.to(device)), bias

        yield Case(name, make, TOLERANCE)


OP = Op(
    name="linear_w4a16",
    reference=reference,
    backends={
        "cpu": Backend(_cpu, why_not_cpu),
        "hopper": Backend(_hopper, _why_not_hopper),
        "triton": Backend(_triton, _why_not_triton),
        "expand": Backend(_expand, _why_not_triton),
    },
    cases=_cases,
    preferred=_preferred,
)
