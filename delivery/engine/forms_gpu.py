"""Forms for a GPU: layers packed for its kernels, norms and activations fused with what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from delivery.engine.engine_model import Run
from delivery.engine.forms_experts import ExpertLayers, QuantizedExperts, StackedExperts, stacked
from delivery.engine.forms_torch import TorchForms
from delivery.kernels import OPS, linear_w4a16, linear_w8a8, linear_w8a16, linear_w16a16
from delivery.kernels.w4_layout import PackedW4
from delivery.kernels.w8_layout import PackedW8
from delivery.model.config import ModelConfig
from delivery.model.weights import GatedActivation, Linear, Norm, Projection
from delivery.qtensor import QTensor


@dataclass(frozen=True, slots=True)
class Quantized:
    """An activation in 8 bits, made once and read by every layer behind: q [T, K], scale float32 [T, 1]."""

    q: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class Dense:
    """A float layer; weight [N, K]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = OPS["linear_w16a16"](x, self.weight, self.bias)
        return out


@dataclass(frozen=True, slots=True)
class FourBit:
    """4-bit weights in groups, float activations."""

    packed: PackedW4
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = OPS["linear_w4a16"](x, self.packed, self.bias)
        return out


@dataclass(frozen=True, slots=True)
class EightBit:
    """8-bit weights, float activations."""

    packed: PackedW8
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = OPS["linear_w8a16"](x, self.packed, self.bias)
        return out


@dataclass(frozen=True, slots=True)
class EightByEight:
    """8-bit weights and activations; takes plain activations (quantised here) or `Quantized` ones."""

    packed: PackedW8
    bias: torch.Tensor | None
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor | Quantized) -> torch.Tensor:
        if isinstance(x, Quantized):
            out: torch.Tensor = OPS["linear_w8a8"](x.q, self.packed, self.bias, None, x.scale, self.dtype)
        else:
            out = OPS["linear_w8a8"](x, self.packed, self.bias)
        return out

    @property
    def quantizes_to(self) -> torch.dtype | None:
        """The dtype that a layer in front may quantise to per token; None when the scale is fixed."""
        return None if self.packed.input_scale is not None else self.packed.weight.dtype


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """RMSNorm, with the residual addition where there is one. quantize: also to 8 bits, per token."""

    name: str
    weight: torch.Tensor
    eps: float
    plus_one: bool
    quantize: torch.dtype | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor | Quantized:
        if self.quantize is None:
            out: torch.Tensor = OPS["rms_norm"](x, self.weight, self.eps, self.plus_one)
            return out
        return Quantized(*OPS["rms_norm_quant"](x, self.weight, self.eps, self.quantize, self.plus_one))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor | Quantized, torch.Tensor]:
        """(norm(x + residual), x + residual) in one pass."""
        settings = (self.weight, self.eps)
        if self.quantize is None:
            out: tuple[torch.Tensor, torch.Tensor] = OPS["add_rms_norm"](
                x, residual, *settings, self.plus_one
            )
            return out
        q, scale, total = OPS["add_rms_norm_quant"](x, residual, *settings, self.quantize, self.plus_one)
        return Quantized(q, scale), total


@dataclass(frozen=True, slots=True)
class FusedGate:
    """act(gate) · up in one pass over the joined projection. quantize: also to 8 bits, per token."""

    activation: str
    quantize: torch.dtype | None

    def __call__(self, both: Projection) -> Any:
        joined = both.joined if both.joined is not None else torch.cat(both.parts, dim=-1)
        if self.quantize is None:
            return OPS["silu_mul"](joined, self.activation)
        return Quantized(*OPS["silu_mul_quant"](joined, self.quantize, self.activation))


class GpuForms:
    """Every layer in the form that its weight calls for; what no kernel takes is expanded to `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._fallback = TorchForms(dtype)

    def linear(self, layer: Linear) -> Run:
        bias = None if layer.bias is None else layer.bias.to(self.dtype)
        weight = layer.weight
        if not isinstance(weight, QTensor):
            return Dense(linear_w16a16.pack(weight.to(self.dtype)), bias)
        if weight.act_dtype is not None and linear_w8a8.why_not_pack(weight) is None:
            return EightByEight(linear_w8a8.pack(weight), bias, self.dtype)
        if weight.act_dtype is None and linear_w4a16.why_not_pack(weight) is None:
            return FourBit(linear_w4a16.pack(weight), bias)
        if weight.act_dtype is None and linear_w8a16.why_not_pack(weight) is None:
            return EightBit(linear_w8a16.pack(weight), bias)
        return self._fallback.linear(layer)

    def norm(self, norm: Norm, feeds: Sequence[Run]) -> FusedNorm:
        return FusedNorm(norm.name, norm.weight.contiguous(), norm.eps, norm.plus_one, _common(feeds))

    def gated(self, config: ModelConfig, feeds: Run | None) -> GatedActivation | None:
        return FusedGate(config.activation, _common([] if feeds is None else [feeds]))

    def experts(
        self, config: ModelConfig, experts: Sequence[ExpertLayers]
    ) -> StackedExperts | QuantizedExperts | None:
        return stacked(experts, config.activation, self.dtype)

    def table(self, table: torch.Tensor) -> torch.Tensor:
        return table.to(self.dtype)


def _common(feeds: Sequence[Run]) -> torch.dtype | None:
    """The 8-bit dtype that all readers take, None when one of them wants plain activations."""
    wanted = {feed.quantizes_to if isinstance(feed, EightByEight) else None for feed in feeds}
    return wanted.pop() if len(wanted) == 1 else None
