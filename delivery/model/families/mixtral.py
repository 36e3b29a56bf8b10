"""Mixtral: Mistral with experts, whose layers are called w1, w3 and w2."""

from __future__ import annotations

from delivery.model.config import ModelConfig, MoESpec
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig, Part

_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def config(hf: HfConfig) -> ModelConfig:
    moe = MoESpec(
        num_experts=reading.optional_int(hf, "num_local_experts", 8),
        experts_per_token=reading.optional_int(hf, "num_experts_per_tok", 2),
        intermediate_size=reading.need_int(hf, "intermediate_size"),
        normalize_topk=True,
        layers=tuple(range(reading.num_layers(hf))),
    )
    rope = reading.rope(hf, reading.head_dim(hf), theta=1_000_000.0)
    eps = reading.number(hf, "rms_norm_eps", 1e-5)
    return reading.decoder(hf, "mixtral", moe=moe, rope=rope, rms_eps=eps, **reading.one_window(hf))


def linears(config: ModelConfig, layer: int) -> dict[str, Part]:
    assert config.moe is not None
    at = f"layers.{layer}.block_sparse_moe"
    return {**naming.attention(config, layer), **naming.experts(config.moe, at, _NAMES)}


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    config=config,
    linears=linears,
    norms=naming.norms,
)
