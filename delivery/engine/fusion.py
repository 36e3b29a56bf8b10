"""The fusion report: which operators of a decoder block became which kernels. No torch.

A memory pass is one activation tensor read or written by one kernel; weights, tables and the KV cache
are left out, since fusing changes nothing about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from delivery.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Operator:
    """One kernel launch: activation tensors that it reads and writes."""

    name: str
    reads: int
    writes: int

    @property
    def passes(self) -> int:
        return self.reads + self.writes


@dataclass(frozen=True, slots=True)
class Fusion:
    """Operators as the model's definition lists them, and the kernels that compute them here."""

    name: str
    before: tuple[Operator, ...]
    after: tuple[Operator, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "operators": [op.name for op in self.before],
            "kernels": [op.name for op in self.after],
            "passes_before": sum(op.passes for op in self.before),
            "passes_after": sum(op.passes for op in self.after),
        }


def report(config: ModelConfig, *, quantized_activations: bool = False) -> list[dict[str, Any]]:
    """Fusions of one full-attention block; quantized_activations: its linears read 8-bit inputs."""
    return [f.to_json() for f in _fusions(config, quantized_activations)]


def _fusions(config: ModelConfig, quantized: bool) -> list[Fusion]:
    quantize = (Operator("quantise", 1, 1),) if quantized else ()
    suffix = "+quantise" if quantized else ""
    norm = (
        Operator("add residual", 2, 1),
        Operator("square and mean", 1, 1),
        Operator("scale by rsqrt", 2, 1),
        Operator("multiply by weight", 1, 1),
        *quantize,
    )
    heads = (Operator("norm q", 1, 1), Operator("norm k", 1, 1)) if config.qk_norm else ()
    rotary = (
        *heads,
        Operator("rotate q", 1, 1),
        Operator("rotate k", 1, 1),
        Operator("write keys", 1, 0),
        Operator("write values", 1, 0),
    )
    attention = (
        Operator("gather keys and values", 0, 2),
        Operator("scores", 2, 1),
        Operator("mask and softmax", 1, 1),
        Operator("weighted sum", 2, 1),
    )
    activation = (Operator(config.activation, 1, 1), Operator("multiply", 2, 1), *quantize)
    return [
        Fusion("residual and norm", norm, (Operator(f"add+norm{suffix}", 2, 2),)),
        Fusion("q, k and v", tuple(Operator(p, 1, 1) for p in ("q", "k", "v")), (Operator("qkv", 1, 1),)),
        Fusion("rotary and cache", rotary, (Operator("rope+cache write", 3, 1),)),
        Fusion("attention", attention, (Operator("paged attention", 1, 1),)),
        Fusion("gate and up", (Operator("gate", 1, 1), Operator("up", 1, 1)), (Operator("gate_up", 1, 1),)),
        Fusion("activation", activation, (Operator(f"{config.activation}·mul{suffix}", 1, 1),)),
    ]
