"""Qwen3: RMSNorm on every query and key head; head size apart from hidden / heads."""

from __future__ import annotations

from delivery.model.config import ModelConfig
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig
from delivery.model.families.qwen2 import windows


def config(hf: HfConfig) -> ModelConfig:
    dim = reading.optional_int(hf, "head_dim", 128)
    return reading.decoder(hf, "qwen3", qk_norm=True, head_dim=dim, **windows(hf))


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    config=config,
    linears=naming.linears,
    norms=naming.norms,
)
