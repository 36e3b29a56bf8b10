"""Gemma: norms multiply by 1 + w, embeddings are scaled by the root of the hidden size."""

from __future__ import annotations

from typing import Any

from delivery.model.config import ModelConfig
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig


def common(hf: HfConfig) -> dict[str, Any]:
    """What all of Gemma's generations share. The head size is stated, or 256 by their configs' default."""
    return {
        "head_dim": reading.optional_int(hf, "head_dim", 256),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", True)),
        "norm_plus_one": True,
        "embedding_scale": reading.need_int(hf, "hidden_size") ** 0.5,
        "activation": reading.activation(hf, "hidden_activation", "gelu_pytorch_tanh"),
    }


def config(hf: HfConfig) -> ModelConfig:
    # Its published configs say `gelu`, or nothing, and mean the tanh form.
    return reading.decoder(hf, "gemma", **{**common(hf), "activation": "gelu_tanh"})


FAMILY = Family(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    config=config,
    linears=naming.linears,
    norms=naming.norms,
)
