"""Gemma 2: norms around both halves of a block, capped scores and logits, every other layer slides."""

from __future__ import annotations

from typing import Any

from delivery.model.config import LayerType, ModelConfig
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig
from delivery.model.families.gemma import common


def sandwiched(hf: HfConfig, period: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share; every layer slides but each `period`-th."""
    layers = reading.num_layers(hf)
    kinds: tuple[LayerType, ...] = tuple(
        "sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)
    )
    return common(hf) | {
        "sandwich_norms": True,
        "attention_scale": reading.number(hf, "query_pre_attn_scalar", 256.0) ** -0.5,
        "sliding_window": reading.optional_int(hf, "sliding_window", 4096),
        "layer_types": reading.layer_types(hf, kinds),
    }


def config(hf: HfConfig) -> ModelConfig:
    return reading.decoder(
        hf,
        "gemma2",
        attention_softcap=reading.cap(hf, "attn_logit_softcapping", 50.0),
        logit_softcap=reading.cap(hf, "final_logit_softcapping", 30.0),
        **sandwiched(hf, 2),
    )


FAMILY = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    config=config,
    linears=naming.linears,
    norms=naming.sandwich_norms,
)
