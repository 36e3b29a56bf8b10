"""One linear layer of a GPU, run by a given choice of backend and tile: to be compiled, to be measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from delivery.engine.forms_gpu import Dense, EightByEight, FourBit
from delivery.kernels import linear_w4a16, linear_w8a8, linear_w16a16
from delivery.kernels.quantize_per_token import OP as QUANTIZE
from delivery.kernels.tuning import Choice

FARTHEST = 0.02
"""Of the length of a row: bf16 answers are 0.002 away, fp8 sums over ten thousand features 0.01; a product
that loses one tensor-core step of sixteen, 0.25."""

Layer = FourBit | EightByEight | Dense


def run_layer(layer: Layer, x: Any, choice: Choice) -> torch.Tensor:
    """One layer by one choice; x as `sample_activations` makes it for the layer."""
    if isinstance(layer, FourBit):
        return linear_w4a16.run(x, layer.packed, layer.bias, choice)
    if isinstance(layer, EightByEight):
        return linear_w8a8.run(x[0], layer.packed, layer.bias, choice, x[1], layer.dtype)
    return linear_w16a16.run(x, layer.weight, layer.bias, choice)


def sample_activations(layer: Layer, rows: int, k: int, dtype: torch.dtype) -> Any:
    """Random activations [rows, k] as a layer takes them: quantised, with their scales, for 8 bits."""
    x = torch.randn(rows, k, device=next(tensors_of(layer)).device).to(dtype)
    if isinstance(layer, EightByEight):
        return QUANTIZE(x, layer.packed.weight.dtype, layer.packed.input_scale)
    return x


def expected(layer: Layer, x: Any) -> torch.Tensor:
    """What the layer answers to x, in float32, by its operator's reference: float32 [rows, N]."""
    if isinstance(layer, FourBit):
        return linear_w4a16.reference(x.float(), layer.packed, layer.bias)
    if isinstance(layer, EightByEight):
        return linear_w8a8.reference(x[0], layer.packed, layer.bias, None, x[1], torch.float32)
    return linear_w16a16.reference(x.float(), layer.weight, layer.bias)


def agrees(answer: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether no row of an answer [rows, N] is further from `wanted` than rounding takes it (`FARTHEST`)."""
    distance = (answer.float() - wanted).norm(dim=1)
    return bool((distance <= FARTHEST * wanted.norm(dim=1)).all())  # not a number compares as false


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors that a value holds in its fields."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))
