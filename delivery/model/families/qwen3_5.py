"""Qwen3.5: Qwen3-Next with a dense MLP, and every projection of the delta rule on its own."""

from __future__ import annotations

from delivery.model.config import ModelConfig
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig, Part
from delivery.model.families.qwen3_next import hybrid


def config(hf: HfConfig) -> ModelConfig:
    return reading.decoder(hf, "qwen3_5", **hybrid(hf))


def linears(config: ModelConfig, layer: int) -> dict[str, Part]:
    mlp = naming.mixed_mlp(config, layer)
    if config.layer_types[layer] == "linear_attention":
        return {**naming.delta(layer), **mlp}
    return {**naming.gated_attention(config, layer), **mlp}


FAMILY = Family(
    name="qwen3_5",
    architectures=("Qwen3_5ForCausalLM",),
    config=config,
    linears=linears,
    norms=naming.norms,
    tensors=naming.delta_tensors,
)
