"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; the upper layers may slide."""

from __future__ import annotations

from typing import Any

from delivery.model.config import ModelConfig
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig


def windows(hf: HfConfig) -> dict[str, Any]:
    """`sliding_window` and `layer_types` as Qwen states them: from layer `max_window_layers` up."""
    layers = reading.num_layers(hf)
    window = reading.sliding_window(hf) if hf.get("use_sliding_window") else None
    first = reading.max_window_layers(hf)
    sliding = [window is not None and i >= first for i in range(layers)]
    default = tuple("sliding_attention" if s else "full_attention" for s in sliding)
    return {"sliding_window": window, "layer_types": reading.layer_types(hf, default)}  # type: ignore[arg-type]


def config(hf: HfConfig) -> ModelConfig:
    return reading.decoder(hf, "qwen2", **windows(hf))


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    config=config,
    linears=naming.linears,
    norms=naming.norms,
)
