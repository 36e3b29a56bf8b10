"""Mistral: Llama with a sliding window in every layer where `sliding_window` is a number."""

from __future__ import annotations

from delivery.model.config import ModelConfig
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig


def config(hf: HfConfig) -> ModelConfig:
    window = hf.get("sliding_window", 4096)
    layers = reading.need_int(hf, "num_hidden_layers")
    return reading.decoder(
        hf,
        "mistral",
        sliding_window=window,
        layer_types=("full_attention" if window is None else "sliding_attention",) * layers,
    )


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    config=config,
    linears=naming.linears,
    norms=naming.norms,
)
