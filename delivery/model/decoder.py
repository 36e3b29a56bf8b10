"""The decoder block: the one description of what a model computes.

Calibration, evaluation and the engine all run this function; they differ in the mixer (dense or
paged attention) and in the forms of the weights (float, quantised, fused), never in the arithmetic.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from delivery.model.attention import Mixer
from delivery.model.config import ModelConfig, MoESpec
from delivery.model.delta import gated_norm
from delivery.model.weights import Activation, BlockWeights, Projection

QKV = ("q_proj", "k_proj", "v_proj")


def block(
    config: ModelConfig,
    layer: int,
    weights: BlockWeights,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    mix: Mixer,
) -> torch.Tensor:
    """hidden [T, H] → [T, H]: a flat batch of T tokens through decoder block `layer`.

    positions: int64 [T], each token's place in its own sequence. Nothing is changed in place.
    """
    residual, delta = stream(config, layer, weights, hidden, None, positions, mix)
    return residual + delta


def stream(
    config: ModelConfig,
    layer: int,
    weights: BlockWeights,
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    positions: torch.Tensor,
    mix: Mixer,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`block` with the last addition left to the next norm: (residual, delta) → (residual, delta).

    The hidden state is residual + delta; a chain of these lets add and norm be one kernel.
    """
    norms = weights.norms
    x, residual = _normed(norms["input_norm"], residual, delta)
    if config.layer_types[layer] == "linear_attention":
        mixed = _gated_delta(config, layer, weights, x, mix)
    else:
        mixed = _attention(config, layer, weights, x, positions, mix)
    if config.sandwich_norms:
        mixed = norms["post_attention_norm"](mixed)
    x, residual = _normed(norms["pre_mlp_norm"], residual, mixed)
    if config.moe is not None and layer in config.moe.layers:
        out = _experts(config, config.moe, weights, x)
    else:
        out = _mlp(config, weights, "", x)
    return residual, norms["post_mlp_norm"](out) if config.sandwich_norms else out


def _normed(
    norm: object, residual: torch.Tensor, delta: torch.Tensor | None
) -> tuple[Activation, torch.Tensor]:
    if delta is None:
        return norm(residual), residual  # type: ignore[operator]
    return norm.add(delta, residual)  # type: ignore[attr-defined, no-any-return]


def _attention(
    config: ModelConfig,
    layer: int,
    weights: BlockWeights,
    x: Activation,
    positions: torch.Tensor,
    mix: Mixer,
) -> torch.Tensor:
    q, k, v = weights.project(QKV, x).parts
    q = q.unflatten(-1, (config.num_heads, config.head_dim))
    k = k.unflatten(-1, (config.num_kv_heads, config.head_dim))
    v = v.unflatten(-1, (config.num_kv_heads, config.head_dim))
    mixed = mix.attention(config, layer, q, k, v, positions, weights.norms)
    if config.attention_gate:
        mixed = mixed * torch.sigmoid(weights.linears["attn_gate"](x))
    return weights.linears["o_proj"](mixed)


def _gated_delta(
    config: ModelConfig, layer: int, weights: BlockWeights, x: torch.Tensor, mix: Mixer
) -> torch.Tensor:
    """The gated delta rule in place of attention: no keys are kept, but a state of fixed size."""
    spec, linears, tensors = config.delta, weights.linears, weights.tensors
    assert spec is not None
    rate = functional.softplus(linears["in_proj_a"](x).to(wide(x.dtype)) + tensors["dt_bias"])
    decay = -tensors["a_log"].to(rate.dtype).exp() * rate
    beta = torch.sigmoid(linears["in_proj_b"](x))
    kernel = tensors["conv"].squeeze(1)
    mixed = mix.gated_delta(config, layer, linears["in_proj_qkv"](x), decay, beta, kernel)
    gate = linears["in_proj_z"](x).unflatten(-1, (spec.num_value_heads, spec.value_head_dim))
    mixed = gated_norm(mixed, tensors["gate_norm"], gate, config.rms_eps)
    return linears["out_proj"](mixed.flatten(1))


def _mlp(config: ModelConfig, weights: BlockWeights, prefix: str, x: Activation) -> torch.Tensor:
    both = weights.project((f"{prefix}gate_proj", f"{prefix}up_proj"), x)
    inner = gated(config.activation, both) if weights.gated is None else weights.gated(both)
    return weights.linears[f"{prefix}down_proj"](inner)


def _experts(config: ModelConfig, moe: MoESpec, weights: BlockWeights, x: torch.Tensor) -> torch.Tensor:
    """Each token through the experts that the router chose for it, and through the one that all share."""
    scores = torch.softmax(weights.linears["router"](x), dim=-1, dtype=wide(x.dtype))
    share, chosen = scores.topk(moe.experts_per_token, dim=-1)
    if moe.normalize_topk:
        share = share / share.sum(-1, keepdim=True)
    if weights.experts is not None:
        out = weights.experts(x, share, chosen)
    else:
        out = _routed(config, weights, x, share, chosen)
    if moe.shared_intermediate_size:
        shared = _mlp(config, weights, "shared_expert.", x)
        if moe.shared_expert_gate:
            shared = torch.sigmoid(weights.linears["shared_expert_gate"](x)) * shared
        out = out + shared
    return out


def _routed(
    config: ModelConfig, weights: BlockWeights, x: torch.Tensor, share: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """x [T, H] through experts `chosen` int64 [T, k], weighted by `share` [T, k]: expert by expert."""
    out = torch.zeros_like(x, dtype=share.dtype)
    for expert in chosen.unique().tolist():
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        made = _mlp(config, weights, f"experts.{expert}.", x[token])
        out = out.index_add(0, token, share[token, choice, None] * made)
    return out.to(x.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for that: what sums over many values are formed in."""
    return torch.promote_types(dtype, torch.float32)


def gated(activation: str, both: Projection) -> torch.Tensor:
    """act(gate) · up: the reference form of the MLP's activation."""
    gate, up = both.parts
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def embed(
    config: ModelConfig, table: torch.Tensor, token_ids: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Rows of table [vocabulary, H] for token_ids [T] → [T, H] in `dtype`, times the embedding scale."""
    hidden = functional.embedding(token_ids, table)
    hidden = hidden if dtype is None else hidden.to(dtype)
    if config.embedding_scale != 1.0:
        # The scale itself is rounded to the activations' dtype, as the Gemma checkpoints were trained.
        hidden = hidden * torch.tensor(config.embedding_scale, dtype=hidden.dtype)
    return hidden


def final_logits(config: ModelConfig, norm: object, head: object, hidden: torch.Tensor) -> torch.Tensor:
    """hidden [T, H] → logits [T, vocabulary] in hidden's dtype.

    norm: the final Norm. head: a callable [T, H] → [T, vocabulary] (a Linear), or a table [vocabulary, H].
    """
    x = norm(hidden)  # type: ignore[operator]
    logits: torch.Tensor = functional.linear(x, head) if isinstance(head, torch.Tensor) else head(x)  # type: ignore[operator]
    return scale_and_cap(config, logits)


def scale_and_cap(config: ModelConfig, logits: torch.Tensor) -> torch.Tensor:
    """Logits times the model's constant (Granite), squeezed into ± its cap (Gemma 2); or as they are."""
    if config.logit_scale != 1.0:
        logits = logits * config.logit_scale
    cap = config.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)
