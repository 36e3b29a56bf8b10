"""Phi-3, Phi-3.5 and Phi-4(-mini): fused QKV and gate-up, LongRoPE, partial rotary in Phi-4-mini."""

from __future__ import annotations

from delivery.model.config import ModelConfig
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig, Part


def config(hf: HfConfig) -> ModelConfig:
    return reading.decoder(
        hf,
        "phi3",
        rope=reading.rope(hf, reading.head_dim(hf), renamed={"su": "longrope", "yarn": "longrope"}),
        rms_eps=reading.number(hf, "rms_norm_eps", 1e-5),
        **reading.one_window(hf),
    )


def linears(config: ModelConfig, layer: int) -> dict[str, Part]:
    at = f"layers.{layer}"
    return {
        **naming.fused_qkv(config, f"{at}.self_attn.qkv_proj"),
        "o_proj": Part(f"{at}.self_attn.o_proj"),
        **naming.fused_gate_up(config, f"{at}.mlp.gate_up_proj"),
        "down_proj": Part(f"{at}.mlp.down_proj"),
    }


FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    config=config,
    linears=linears,
    norms=naming.norms,
)
