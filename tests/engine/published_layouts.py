"""InternLM2, InternLM3 and ChatGLM as their publishers' own code computes them, on seeded weights.

Written from the published modelling files' description of layouts, one sequence at a time, in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

State = dict[str, torch.Tensor]
Forward = Callable[[dict[str, Any], State, list[int]], torch.Tensor]
HEADS, GROUPS, DIM, INNER, LAYERS, VOCABULARY = 4, 2, 16, 56, 2, 99
HIDDEN = HEADS * DIM  # InternLM2 has no head_dim of its own


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [T, heads, d], k, v [T, groups, d] → [T, heads · d]."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
    scores = scores + torch.full(scores.shape[1:], float("-inf")).triu(1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)


def turn_halves(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Feature i with i + d / 2."""
    tokens, _, dim = x.shape
    rates = theta ** (-torch.arange(0, dim, 2).float() / dim)
    angle = torch.outer(torch.arange(tokens).float(), rates).repeat(1, 2)[:, None]
    turned = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
    return x * angle.cos() + turned * angle.sin()


def turn_neighbours(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Feature 2i with 2i + 1, over the first half of each head."""
    tokens, heads, dim = x.shape
    half = dim // 2
    rates = theta ** (-torch.arange(0, half, 2).float() / half)
    angle = torch.outer(torch.arange(tokens).float(), rates)[:, None]
    pairs = x[..., :half].reshape(tokens, heads, half // 2, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    made = torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
    return torch.cat([made.flatten(2), x[..., half:]], -1)


def linear(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))


def internlm2(config: dict[str, Any], state: State, ids: list[int]) -> torch.Tensor:
    eps, theta = config["rms_norm_eps"], config["rope_theta"]
    x = state["model.tok_embeddings.weight"][ids]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        fused = linear(state, f"{at}.attention.wqkv", rms(x, state[f"{at}.attention_norm.weight"], eps))
        fused = fused.view(len(ids), GROUPS, HEADS // GROUPS + 2, DIM)
        q, k, v = fused[:, :, :-2].flatten(1, 2), fused[:, :, -2], fused[:, :, -1]
        mixed = attend(turn_halves(q, theta), turn_halves(k, theta), v)
        x = x + linear(state, f"{at}.attention.wo", mixed)
        y = rms(x, state[f"{at}.ffn_norm.weight"], eps)
        inner = functional.silu(linear(state, f"{at}.feed_forward.w1", y))
        x = x + linear(state, f"{at}.feed_forward.w2", inner * linear(state, f"{at}.feed_forward.w3", y))
    return linear(state, "output", rms(x, state["model.norm.weight"], eps))


def internlm3(config: dict[str, Any], state: State, ids: list[int]) -> torch.Tensor:
    eps, theta = config["rms_norm_eps"], config["rope_theta"]
    x = state["model.embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        y = rms(x, state[f"{at}.input_layernorm.weight"], eps)
        q, k, v = (linear(state, f"{at}.self_attn.{n}_proj", y).unflatten(-1, (-1, DIM)) for n in "qkv")
        mixed = attend(turn_halves(q, theta), turn_halves(k, theta), v)
        x = x + linear(state, f"{at}.self_attn.o_proj", mixed)
        y = rms(x, state[f"{at}.post_attention_layernorm.weight"], eps)
        inner = functional.silu(linear(state, f"{at}.mlp.gate_proj", y))
        x = x + linear(state, f"{at}.mlp.down_proj", inner * linear(state, f"{at}.mlp.up_proj", y))
    return linear(state, "lm_head", rms(x, state["model.norm.weight"], eps))


def chatglm(config: dict[str, Any], state: State, ids: list[int]) -> torch.Tensor:
    eps, theta = config["layernorm_epsilon"], 10000.0 * config["rope_ratio"]
    x = state["transformer.embedding.word_embeddings.weight"][ids]
    for layer in range(LAYERS):
        at = f"transformer.encoder.layers.{layer}"
        y = rms(x, state[f"{at}.input_layernorm.weight"], eps)
        fused = linear(state, f"{at}.self_attention.query_key_value", y)
        if config["multi_query_attention"]:
            parts = fused.split([HEADS * DIM, GROUPS * DIM, GROUPS * DIM], -1)
            q, k, v = (part.unflatten(-1, (-1, DIM)) for part in parts)
        else:
            q, k, v = fused.view(len(ids), HEADS, 3 * DIM).split(DIM, -1)
        mixed = attend(turn_neighbours(q, theta), turn_neighbours(k, theta), v)
        x = x + linear(state, f"{at}.self_attention.dense", mixed)
        y = rms(x, state[f"{at}.post_attention_layernorm.weight"], eps)
        gate, up = linear(state, f"{at}.mlp.dense_h_to_4h", y).chunk(2, -1)
        x = x + linear(state, f"{at}.mlp.dense_4h_to_h", functional.silu(gate) * up)
    return linear(
        state, "transformer.output_layer", rms(x, state["transformer.encoder.final_layernorm.weight"], eps)
    )


def seeded(shapes: dict[str, tuple[int, ...]]) -> State:
    """Norms near one, biases small, matrices that keep sizes."""
    random = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=random)
        if len(shape) == 1:
            state[name] = values * 0.1 + (1.0 if "norm" in name else 0.0)
        else:
            state[name] = values if "embed" in name else values * shape[-1] ** -0.5
    return state


def internlm2_model(bias: bool = False) -> tuple[dict[str, Any], State]:
    shapes: dict[str, tuple[int, ...]] = {"model.tok_embeddings.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.attention.wqkv.weight": ((HEADS + 2 * GROUPS) * DIM, HIDDEN),
            f"{at}.attention.wo.weight": (HIDDEN, HEADS * DIM),
            f"{at}.feed_forward.w1.weight": (INNER, HIDDEN),
            f"{at}.feed_forward.w3.weight": (INNER, HIDDEN),
            f"{at}.feed_forward.w2.weight": (HIDDEN, INNER),
            f"{at}.attention_norm.weight": (HIDDEN,),
            f"{at}.ffn_norm.weight": (HIDDEN,),
        }
        if bias:
            shapes[f"{at}.attention.wqkv.bias"] = ((HEADS + 2 * GROUPS) * DIM,)
            shapes[f"{at}.attention.wo.bias"] = (HIDDEN,)
    shapes |= {"model.norm.weight": (HIDDEN,), "output.weight": (VOCABULARY, HIDDEN)}
    return _config("InternLM2ForCausalLM", "internlm2", bias=bias), seeded(shapes)


def internlm3_model() -> tuple[dict[str, Any], State]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * DIM, HIDDEN),
            ("self_attn.k_proj", GROUPS * DIM, HIDDEN),
            ("self_attn.v_proj", GROUPS * DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * DIM),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            shapes[f"{at}.{name}.weight"] = (rows, columns)
            if name[-6:] in ("q_proj", "k_proj", "v_proj"):
                shapes[f"{at}.{name}.bias"] = (rows,)
        shapes |= {f"{at}.{n}_layernorm.weight": (HIDDEN,) for n in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    dynamic = {"rope_type": "dynamic", "factor": 6.0}
    config = _config("InternLM3ForCausalLM", "internlm3", qkv_bias=True, bias=False, head_dim=DIM)
    return {**config, "rope_scaling": dynamic}, seeded(shapes)


def chatglm_model(grouped: bool = True) -> tuple[dict[str, Any], State]:
    fused = (HEADS + 2 * (GROUPS if grouped else HEADS)) * DIM
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.embedding.word_embeddings.weight": (VOCABULARY, HIDDEN),
        "transformer.rotary_pos_emb.inv_freq": (DIM // 4,),
    }
    for layer in range(LAYERS):
        at = f"transformer.encoder.layers.{layer}"
        shapes |= {
            f"{at}.self_attention.query_key_value.weight": (fused, HIDDEN),
            f"{at}.self_attention.query_key_value.bias": (fused,),
            f"{at}.self_attention.dense.weight": (HIDDEN, HEADS * DIM),
            f"{at}.mlp.dense_h_to_4h.weight": (2 * INNER, HIDDEN),
            f"{at}.mlp.dense_4h_to_h.weight": (HIDDEN, INNER),
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
        }
    shapes["transformer.encoder.final_layernorm.weight"] = (HIDDEN,)
    shapes["transformer.output_layer.weight"] = (VOCABULARY, HIDDEN)
    config = {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "ffn_hidden_size": INNER,
        "hidden_size": HIDDEN,
        "kv_channels": DIM,
        "layernorm_epsilon": 1e-5,
        "multi_query_attention": grouped,
        "multi_query_group_num": GROUPS,
        "num_attention_heads": HEADS,
        "num_layers": LAYERS,
        "original_rope": True,
        "padded_vocab_size": VOCABULARY,
        "post_layer_norm": True,
        "rmsnorm": True,
        "rope_ratio": 50,
        "seq_length": 128,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return config, seeded(shapes)


def _config(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 20000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **changes,
    }
