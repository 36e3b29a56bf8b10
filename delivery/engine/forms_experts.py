"""Experts of a mixture as two stacked matrices: one grouped launch each, without a look at the routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from delivery.engine.merging import merge
from delivery.kernels import OPS
from delivery.kernels.expert_layout import PackedExperts, pack, why_not_pack
from delivery.model.weights import Linear
from delivery.qtensor import QTensor

ExpertLayers = tuple[Linear, Linear, Linear]
"""gate, up and down of one expert."""


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """gate_up [E, 2I, H], gate rows first; down [E, H, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: str

    def __call__(self, x: torch.Tensor, share: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """x [T, H], share [T, k], chosen int64 [T, k] → [T, H]."""
        out: torch.Tensor = OPS["fused_moe"](x, self.gate_up, self.down, share, chosen, self.activation)
        return out


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """The same with quantised weights."""

    gate_up: PackedExperts
    down: PackedExperts
    activation: str

    def __call__(self, x: torch.Tensor, share: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """x [T, H], share [T, k], chosen int64 [T, k] → [T, H]."""
        made = OPS["fused_moe_quant"](x, self.gate_up, self.down, share.to(x.dtype), chosen, self.activation)
        out: torch.Tensor = made
        return out


def stacked(
    experts: Sequence[ExpertLayers], activation: str, dtype: torch.dtype
) -> StackedExperts | QuantizedExperts | None:
    """Experts without biases as one: float ones in `dtype`, quantised ones as they are. None for those that
    no kernel takes together, which run one by one."""
    layers = [layer for expert in experts for layer in expert]
    if any(layer.bias is not None for layer in layers):
        return None
    if all(isinstance(layer.weight, QTensor) for layer in layers):
        return _quantised(experts, activation)
    weights = [layer.weight for layer in layers if isinstance(layer.weight, torch.Tensor)]
    if len(weights) < len(layers):
        return None
    (inner, hidden), device = weights[0].shape, weights[0].device
    gate_up = torch.empty(len(experts), 2 * inner, hidden, dtype=dtype, device=device)
    down = torch.empty(len(experts), hidden, inner, dtype=dtype, device=device)
    for index in range(len(experts)):
        gate_up[index, :inner], gate_up[index, inner:], down[index] = weights[3 * index : 3 * index + 3]
    return StackedExperts(gate_up, down, activation)


def _quantised(experts: Sequence[ExpertLayers], activation: str) -> QuantizedExperts | None:
    joined = [merge((gate, up)) for gate, up, _ in experts]
    gate_up = [layer.weight for layer in joined if layer is not None and isinstance(layer.weight, QTensor)]
    down = [layer.weight for _, _, layer in experts if isinstance(layer.weight, QTensor)]
    if len(gate_up) < len(experts) or gate_up[0].act_dtype != down[0].act_dtype:
        return None
    if why_not_pack(gate_up) is not None or why_not_pack(down) is not None:
        return None
    return QuantizedExperts(pack(gate_up), pack(down), activation)
