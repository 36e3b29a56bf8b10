"""Qwen3-Next: three layers of the gated delta rule to one of gated attention; experts.

The projections of the delta rule are stored together, interleaved by key head.
"""

from __future__ import annotations

from typing import Any

from delivery.model.config import DeltaSpec, LayerType, ModelConfig
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig, Part


def hybrid(hf: HfConfig) -> dict[str, Any]:
    """What Qwen3-Next and Qwen3.5 share: layer types, sizes of the delta rule, partial rotary, norms."""
    layers = reading.num_layers(hf)
    period = reading.optional_int(hf, "full_attention_interval", 4)
    kinds: tuple[LayerType, ...] = tuple(
        "linear_attention" if (i + 1) % period else "full_attention" for i in range(layers)
    )
    dim = reading.optional_int(hf, "head_dim", 256)
    return {
        "head_dim": dim,
        "rope": reading.rope(hf, dim, partial=0.25),
        "layer_types": reading.layer_types(hf, kinds),
        "norm_plus_one": True,
        "qk_norm": True,
        "attention_gate": True,
        "delta": DeltaSpec(
            num_key_heads=reading.optional_int(hf, "linear_num_key_heads", 16),
            num_value_heads=reading.optional_int(hf, "linear_num_value_heads", 32),
            key_head_dim=reading.optional_int(hf, "linear_key_head_dim", 128),
            value_head_dim=reading.optional_int(hf, "linear_value_head_dim", 128),
            conv_kernel=reading.optional_int(hf, "linear_conv_kernel_dim", 4),
        ),
    }


def config(hf: HfConfig) -> ModelConfig:
    moe = reading.experts({"norm_topk_prob": True, **hf}, shared=True)
    return reading.decoder(hf, "qwen3_next", moe=moe, **hybrid(hf))


def linears(config: ModelConfig, layer: int) -> dict[str, Part]:
    mlp = naming.mixed_mlp(config, layer)
    if config.layer_types[layer] == "linear_attention":
        assert config.delta is not None
        return {**_delta(config.delta, f"layers.{layer}.linear_attn"), **mlp}
    return {**naming.gated_attention(config, layer), **mlp}


def _delta(spec: DeltaSpec, at: str) -> dict[str, Part]:
    """in_proj_qkvz holds q, k, v and z of one key head after the other; in_proj_ba so b and a."""
    each = spec.num_value_heads // spec.num_key_heads
    key, value = spec.key_head_dim, each * spec.value_head_dim
    size = 2 * key + 2 * value

    def rows(begin: int, end: int, size: int) -> tuple[range, ...]:
        return tuple(range(h * size + begin, h * size + end) for h in range(spec.num_key_heads))

    q, k, v = rows(0, key, size), rows(key, 2 * key, size), rows(2 * key, 2 * key + value, size)
    return {
        "in_proj_qkv": Part(f"{at}.in_proj_qkvz", (*q, *k, *v)),
        "in_proj_z": Part(f"{at}.in_proj_qkvz", rows(2 * key + value, size, size)),
        "in_proj_b": Part(f"{at}.in_proj_ba", rows(0, each, 2 * each)),
        "in_proj_a": Part(f"{at}.in_proj_ba", rows(each, 2 * each, 2 * each)),
        "out_proj": Part(f"{at}.out_proj"),
    }


FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    config=config,
    linears=linears,
    norms=naming.norms,
    tensors=naming.delta_tensors,
)
