"""Experts of a mixture as two stacked matrices: one grouped launch each, without a look at the routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from delivery.kernels import OPS
from delivery.model.weights import Linear

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


def stacked(experts: Sequence[ExpertLayers], activation: str, dtype: torch.dtype) -> StackedExperts | None:
    """Experts of float weights without biases in `dtype`; None for others, which run one by one."""
    layers = [layer for expert in experts for layer in expert]
    weights = [layer.weight for layer in layers if isinstance(layer.weight, torch.Tensor)]
    if len(weights) < len(layers) or any(layer.bias is not None for layer in layers):
        return None
    (inner, hidden), device = weights[0].shape, weights[0].device
    gate_up = torch.empty(len(experts), 2 * inner, hidden, dtype=dtype, device=device)
    down = torch.empty(len(experts), hidden, inner, dtype=dtype, device=device)
    for index in range(len(experts)):
        gate_up[index, :inner], gate_up[index, inner:], down[index] = weights[3 * index : 3 * index + 3]
    return StackedExperts(gate_up, down, activation)
