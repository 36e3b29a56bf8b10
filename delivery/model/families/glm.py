"""GLM-4 (first generation, as transformers' Glm): neighbouring rotary pairs in half of each head."""

from __future__ import annotations

from typing import Any

from delivery.model.config import ModelConfig
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig, Part


def common(hf: HfConfig) -> dict[str, Any]:
    """Rotary over `partial_rotary_factor` (0.5) of a head, neighbouring features in pairs."""
    dim = reading.optional_int(hf, "head_dim", 128)
    rope = reading.rope(hf, dim, partial=0.5, interleaved=True)
    return {"head_dim": dim, "rope": rope, "rms_eps": reading.number(hf, "rms_norm_eps", 1.5625e-7)}


def config(hf: HfConfig) -> ModelConfig:
    return reading.decoder(hf, "glm", **common(hf))


def linears(config: ModelConfig, layer: int) -> dict[str, Part]:
    at = f"layers.{layer}"
    return {
        **naming.attention(config, layer),
        **naming.fused_gate_up(config, f"{at}.mlp.gate_up_proj"),
        "down_proj": Part(f"{at}.mlp.down_proj"),
    }


FAMILY = Family(
    name="glm",
    architectures=("GlmForCausalLM",),
    config=config,
    linears=linears,
    norms=naming.norms,
)
