"""The names that Llama's checkpoints introduced and most families kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from delivery.model.config import ModelConfig, MoESpec
from delivery.model.families.family import Part

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def attention(config: ModelConfig, layer: int, at: str = "self_attn") -> dict[str, Part]:
    """q, k, v and o; rows of q and k in half-split order whatever pairs the rotary takes."""
    parts = {name: Part(f"layers.{layer}.{at}.{name}") for name in ATTENTION}
    if config.rope.interleaved:
        for name, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            parts[name] = replace(parts[name], rows=half_split(config, heads))
    return parts


def half_split(config: ModelConfig, heads: int) -> tuple[range, ...]:
    """Rows of `heads` heads whose rotary pairs neighbours (GLM): even features, odd ones, the rest."""
    rows: list[range] = []
    for start in range(0, heads * config.head_dim, config.head_dim):
        turned = start + config.rope.rotary_dim
        rows += [range(start, turned, 2), range(start + 1, turned, 2), range(turned, start + config.head_dim)]
    return tuple(rows)


def mlp(layer: int, at: str = "mlp") -> dict[str, Part]:
    return {name: Part(f"layers.{layer}.{at}.{name}") for name in MLP}


def linears(config: ModelConfig, layer: int) -> dict[str, Part]:
    """Separate q, k, v, o and gate, up, down."""
    return {**attention(config, layer), **mlp(layer)}


def gated_attention(config: ModelConfig, layer: int) -> dict[str, Part]:
    """q, k, v and o; each head's rows in q_proj are followed by those of its gate (Qwen3-Next, Qwen3.5)."""
    parts, dim = attention(config, layer), config.head_dim
    starts = range(0, 2 * dim * config.num_heads, 2 * dim)
    stored = parts["q_proj"].prefix
    parts["q_proj"] = Part(stored, tuple(range(s, s + dim) for s in starts))
    parts["attn_gate"] = Part(stored, tuple(range(s + dim, s + 2 * dim) for s in starts))
    return parts


def delta(layer: int, at: str = "linear_attn") -> dict[str, Part]:
    """The linear layers of the gated delta rule, each stored alone (Qwen3.5)."""
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    return {name: Part(f"layers.{layer}.{at}.{name}") for name in names}


def delta_tensors(config: ModelConfig, layer: int) -> dict[str, str]:
    """Convolution, step sizes, decay rates and the norm behind the gated delta rule."""
    if config.layer_types[layer] != "linear_attention":
        return {}
    at = f"layers.{layer}.linear_attn"
    return {
        "conv": f"{at}.conv1d.weight",
        "dt_bias": f"{at}.dt_bias",
        "a_log": f"{at}.A_log",
        "gate_norm": f"{at}.norm.weight",
    }


def experts(
    moe: MoESpec, at: str, names: Mapping[str, str] | None = None, router: str = "gate"
) -> dict[str, Part]:
    """The router and every expert at the prefix `at`; expert layers may have other `names`.

    An expert's layers are stored one by one, or in tensors of all experts: gate and up joined, and down.
    """
    parts = {"router": Part(f"{at}.{router}")}
    size = moe.intermediate_size
    rows = {"gate_proj": (range(size),), "up_proj": (range(size, 2 * size),)}
    for expert in range(moe.num_experts):
        for name in MLP:
            stack = f"{at}.experts.{'gate_up_proj' if name in rows else 'down_proj'}"
            parts[f"experts.{expert}.{name}"] = Part(
                f"{at}.experts.{expert}.{(names or {}).get(name, name)}",
                alternative=Part(stack, rows.get(name), expert),
            )
    return parts


def mixed_mlp(config: ModelConfig, layer: int) -> dict[str, Part]:
    """Qwen's MLP: dense, or experts with those that all tokens share, as the config says of the layer."""
    at = f"layers.{layer}.mlp"
    if config.moe is None or layer not in config.moe.layers:
        return mlp(layer)
    parts = experts(config.moe, at)
    if config.moe.shared_intermediate_size:
        parts |= {f"shared_expert.{name}": Part(f"{at}.shared_expert.{name}") for name in MLP}
    if config.moe.shared_expert_gate:
        parts["shared_expert_gate"] = Part(f"{at}.shared_expert_gate")
    return parts


def mixed_linears(config: ModelConfig, layer: int) -> dict[str, Part]:
    """Separate q, k, v and o; an MLP as `mixed_mlp` has it."""
    return {**attention(config, layer), **mixed_mlp(config, layer)}


def norms(config: ModelConfig, layer: int) -> dict[str, str]:
    """A norm before attention and one before the MLP, and QK norms where the config says so."""
    at = f"layers.{layer}"
    names = {
        "input_norm": f"{at}.input_layernorm.weight",
        "pre_mlp_norm": f"{at}.post_attention_layernorm.weight",
    }
    attends = config.layer_types[layer] != "linear_attention"
    return {**names, **(qk_norms(layer) if config.qk_norm and attends else {})}


def qk_norms(layer: int) -> dict[str, str]:
    at = f"layers.{layer}.self_attn"
    return {"q_norm": f"{at}.q_norm.weight", "k_norm": f"{at}.k_norm.weight"}


def sandwich_norms(config: ModelConfig, layer: int) -> dict[str, str]:
    """Gemma's four norms: before and after attention, before and after the MLP."""
    at = f"layers.{layer}"
    names = {
        "input_norm": f"{at}.input_layernorm.weight",
        "post_attention_norm": f"{at}.post_attention_layernorm.weight",
        "pre_mlp_norm": f"{at}.pre_feedforward_layernorm.weight",
        "post_mlp_norm": f"{at}.post_feedforward_layernorm.weight",
    }
    return {**names, **(qk_norms(layer) if config.qk_norm else {})}


def fused_qkv(config: ModelConfig, prefix: str) -> dict[str, Part]:
    """q, k and v as consecutive row blocks of one tensor (Phi-3)."""
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    return {
        "q_proj": Part(prefix, (range(q),)),
        "k_proj": Part(prefix, (range(q, q + kv),)),
        "v_proj": Part(prefix, (range(q + kv, q + 2 * kv),)),
    }


def fused_gate_up(config: ModelConfig, prefix: str) -> dict[str, Part]:
    """gate, then up, as row blocks of one tensor (Phi-3, GLM)."""
    size = config.intermediate_size
    return {"gate_proj": Part(prefix, (range(size),)), "up_proj": Part(prefix, (range(size, 2 * size),))}
