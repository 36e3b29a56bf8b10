"""Forms in plain torch: any device, float weights. What other forms fall back on for odd layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from delivery.engine.engine_model import Run
from delivery.engine.forms_experts import ExpertLayers, StackedExperts
from delivery.model.config import ModelConfig
from delivery.model.weights import GatedActivation, Linear, Norm, fake_quantize
from delivery.qtensor import QTensor


@dataclass(frozen=True, slots=True)
class FloatLinear:
    """weight [N, K] and bias in the activations' dtype. act_dtype: activations are rounded to it first."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    act_dtype: torch.dtype | None = None
    input_scale: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.act_dtype is not None:
            x = fake_quantize(x, self.act_dtype, self.input_scale)
        return functional.linear(x, self.weight, self.bias)


class TorchForms:
    """Every layer as a float matrix in `dtype`: quantised weights are expanded once, when loaded."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(self, layer: Linear) -> Run:
        bias = None if layer.bias is None else layer.bias.to(self.dtype)
        if isinstance(layer.weight, QTensor):
            weight = layer.weight
            return FloatLinear(weight.dequantize(self.dtype), bias, weight.act_dtype, weight.input_scale)
        return FloatLinear(layer.weight.to(self.dtype), bias)

    def norm(self, norm: Norm, feeds: Sequence[Run]) -> Any:
        return Norm(norm.name, norm.weight.float(), norm.eps, norm.plus_one)

    def gated(self, config: ModelConfig, feeds: Run | None) -> GatedActivation | None:
        return None

    def experts(self, config: ModelConfig, experts: Sequence[ExpertLayers]) -> StackedExperts | None:
        return None

    def table(self, table: torch.Tensor) -> torch.Tensor:
        return table
