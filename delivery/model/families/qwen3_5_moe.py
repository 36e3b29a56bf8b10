"""Qwen3.5-MoE: Qwen3.5 with experts, which its publisher stacks in one tensor a layer, or not."""

from __future__ import annotations

from delivery.model.config import ModelConfig
from delivery.model.families import naming, qwen3_5, reading
from delivery.model.families.family import Family, HfConfig
from delivery.model.families.qwen3_next import hybrid


def config(hf: HfConfig) -> ModelConfig:
    moe = reading.experts({"norm_topk_prob": True, **hf}, shared=True)
    size = reading.need_int(hf, "moe_intermediate_size")  # no layer has a dense MLP
    return reading.decoder({"intermediate_size": size, **hf}, "qwen3_5_moe", moe=moe, **hybrid(hf))


FAMILY = Family(
    name="qwen3_5_moe",
    architectures=("Qwen3_5MoeForCausalLM",),
    config=config,
    linears=qwen3_5.linears,
    norms=naming.norms,
    tensors=naming.delta_tensors,
)
