"""Gemma 3 (text): five sliding layers to a full one, each kind with its own rotary base; QK norms."""

from __future__ import annotations

from delivery.model.config import ModelConfig, RopeSpec
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig
from delivery.model.families.gemma2 import sandwiched


def config(hf: HfConfig) -> ModelConfig:
    options = sandwiched(hf, reading.optional_int(hf, "sliding_window_pattern", 6))
    dim = options["head_dim"]
    return reading.decoder(
        hf,
        "gemma3",
        qk_norm=True,
        attention_softcap=reading.cap(hf, "attn_logit_softcapping"),
        logit_softcap=reading.cap(hf, "final_logit_softcapping"),
        rope=reading.rope(hf, dim, kind="full_attention", theta=1_000_000.0),
        local_rope=_local(hf, dim),
        **options,
    )


def _local(hf: HfConfig, dim: int) -> RopeSpec:
    """Rotary of the sliding layers: plain, whatever scaling the full ones have."""
    if isinstance(hf.get("rope_parameters"), dict) and "sliding_attention" in hf["rope_parameters"]:
        return reading.rope(hf, dim, kind="sliding_attention")
    return RopeSpec(reading.number(hf, "rope_local_base_freq", 10000.0, over=1.0), dim)


FAMILY = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM",),
    config=config,
    linears=naming.linears,
    norms=naming.sandwich_norms,
)
