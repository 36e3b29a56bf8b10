"""GLM-4-0414: GLM with norms after attention and after the MLP as well."""

from __future__ import annotations

from delivery.model.config import ModelConfig
from delivery.model.families import glm, reading
from delivery.model.families.family import Family, HfConfig


def config(hf: HfConfig) -> ModelConfig:
    return reading.decoder(hf, "glm4", sandwich_norms=True, **glm.common(hf))


def norms(_config: ModelConfig, layer: int) -> dict[str, str]:
    at = f"layers.{layer}"
    return {
        "input_norm": f"{at}.input_layernorm.weight",
        "post_attention_norm": f"{at}.post_self_attn_layernorm.weight",
        "pre_mlp_norm": f"{at}.post_attention_layernorm.weight",
        "post_mlp_norm": f"{at}.post_mlp_layernorm.weight",
    }


FAMILY = Family(
    name="glm4",
    architectures=("Glm4ForCausalLM",),
    config=config,
    linears=glm.linears,
    norms=norms,
)
