"""Qwen1.5-MoE and Qwen2-MoE: routed experts and a gated shared expert."""

from __future__ import annotations

from typing import Any

from delivery.model.config import LayerType, ModelConfig
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig


def windows(hf: HfConfig) -> dict[str, Any]:
    """Where sliding is on, every other layer below `max_window_layers` slides."""
    window = reading.sliding_window(hf) if hf.get("use_sliding_window") else None
    last = reading.max_window_layers(hf)
    kinds: tuple[LayerType, ...] = tuple(
        "sliding_attention" if window is not None and i % 2 == 0 and i < last else "full_attention"
        for i in range(reading.num_layers(hf))
    )
    return {"sliding_window": window, "layer_types": reading.layer_types(hf, kinds)}


def config(hf: HfConfig) -> ModelConfig:
    return reading.decoder(hf, "qwen2_moe", moe=reading.experts(hf, shared=True), **windows(hf))


FAMILY = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    config=config,
    linears=naming.mixed_linears,
    norms=naming.norms,
)
