"""Llama 2 and 3, and the many models that share their config (SmolLM, Yi, DeepSeek-LLM)."""

from __future__ import annotations

from delivery.model.config import ModelConfig
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig


def config(hf: HfConfig) -> ModelConfig:
    return reading.decoder(hf, "llama")


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    config=config,
    linears=naming.linears,
    norms=naming.norms,
)
