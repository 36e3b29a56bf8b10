"""Forms for the CPU: float32 activations, weights in their stored format, decoded in registers.

Every form takes tensors, and computes, or a recorder's buffers, and writes down an operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from delivery.engine.cpu_record import Buffer
from delivery.engine.engine_model import Run
from delivery.engine.forms_experts import ExpertLayers, StackedExperts
from delivery.engine.forms_torch import TorchForms
from delivery.kernels.cpu.layer import linear, padded
from delivery.kernels.cpu.pack import PackedCpu, pack, why_not_pack
from delivery.model.config import ModelConfig
from delivery.model.decoder import gated
from delivery.model.weights import GatedActivation, Linear, Norm, Projection


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A packed layer. x float32 [T, K] → [T, N]."""

    packed: PackedCpu

    def __call__(self, x: Any) -> Any:
        if isinstance(x, Buffer):
            return x.recorder.linear(self.packed, x)
        return linear(self.packed, x)

    @property
    def form(self) -> str:
        return f"cpu-{self.packed.form}"

    @property
    def act_dtype(self) -> torch.dtype | None:
        return self.packed.act_dtype


@dataclass(frozen=True, slots=True)
class CpuNorm:
    """RMSNorm by `effective`, float32 [padded H]: the weight, or 1 + weight, with zeros behind it."""

    effective: torch.Tensor
    size: int
    eps: float

    def __call__(self, x: Any) -> Any:
        if isinstance(x, Buffer):
            return x.recorder.norm(x, self.effective, self.eps)
        return functional.rms_norm(x, (self.size,), self.effective[: self.size], self.eps)

    def add(self, x: Any, residual: Any) -> tuple[Any, Any]:
        """(norm(x + residual), x + residual)."""
        if isinstance(x, Buffer):
            return x.recorder.norm(x, self.effective, self.eps, residual), residual
        total = x + residual
        return self(total), total

    @property
    def weight(self) -> torch.Tensor:
        """What kernels multiply by; the 1 of 1 + weight is in it already."""
        return self.effective[: self.size]

    @property
    def plus_one(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class CpuGated:
    """act(gate) · up."""

    activation: str

    def __call__(self, both: Projection) -> Any:
        joined: Any = both.joined
        if isinstance(joined, Buffer):
            return joined.recorder.gated(joined, self.activation)
        return gated(self.activation, both)


class CpuForms:
    """The CPU's forms; what has none of its own is a float32 matrix."""

    def __init__(self) -> None:
        self.dtype = torch.float32
        self._plain = TorchForms(torch.float32)

    def linear(self, layer: Linear) -> Run:
        if why_not_pack(layer.weight) is not None:
            return self._plain.linear(layer)
        return CpuLinear(pack(layer.weight, layer.bias))

    def norm(self, norm: Norm, feeds: Sequence[Run]) -> Any:
        size = norm.weight.shape[0]
        effective = torch.zeros(padded(size))
        effective[:size] = norm.effective()
        return CpuNorm(effective, size, norm.eps)

    def gated(self, config: ModelConfig, feeds: Run | None) -> GatedActivation | None:
        return CpuGated(config.activation)

    def experts(self, config: ModelConfig, experts: Sequence[ExpertLayers]) -> StackedExperts | None:
        return None

    def table(self, table: torch.Tensor) -> torch.Tensor:
        """Rows of whole chunks, as a tied head has them too."""
        return pack(table).data if why_not_pack(table) is None else table.float()
