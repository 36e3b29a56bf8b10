"""Mistral: Llama with a sliding window in every layer where `sliding_window` is a number."""

from __future__ import annotations

from delivery.model.config import ModelConfig
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig


def config(hf: HfConfig) -> ModelConfig:
    return reading.decoder(hf, "mistral", **reading.one_window(hf, 4096))


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    config=config,
    linears=naming.linears,
    norms=naming.norms,
)
