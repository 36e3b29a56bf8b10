"""Qwen3-MoE: Qwen3's attention, routed experts and none that is shared."""

from __future__ import annotations

from delivery.model.config import ModelConfig
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig


def config(hf: HfConfig) -> ModelConfig:
    window = reading.sliding_window(hf) if hf.get("use_sliding_window") else None
    return reading.decoder(
        hf,
        "qwen3_moe",
        qk_norm=True,
        moe=reading.experts(hf, shared=False),
        **reading.one_window({**hf, "sliding_window": window}),
    )


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    config=config,
    linears=naming.mixed_linears,
    norms=naming.norms,
)
