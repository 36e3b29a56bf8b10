"""Small seeded Llama-like models in memory, for tests of schemes and of the driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from delivery.model import DenseAttention, StateDict, block, load_block, load_config
from delivery.model.config import ModelConfig
from delivery.quantization.group_size import GroupSizes
from delivery.quantization.options import Options

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_tensors(
    hf: Mapping[str, Any] | None = None, seed: int = 0, biases: bool = False
) -> dict[str, torch.Tensor]:
    """Weights of a tiny Llama; some input channels of every norm are planted outliers."""
    c = {**HF, **(hf or {})}
    random = torch.Generator().manual_seed(seed)
    h, i, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * scale

    tensors = {
        "model.embed_tokens.weight": normal(c["vocab_size"], h),
        "model.norm.weight": 1 + normal(h, scale=0.1),
    }
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}"
        for name, rows, columns in (
            ("self_attn.q_proj", q, h),
            ("self_attn.k_proj", kv, h),
            ("self_attn.v_proj", kv, h),
            ("self_attn.o_proj", h, q),
            ("mlp.gate_proj", i, h),
            ("mlp.up_proj", i, h),
            ("mlp.down_proj", h, i),
        ):
            # Modest attention scores and small steps along the residual stream: errors add up, not grow.
            share = {"self_attn.q_proj": 0.3, "self_attn.o_proj": 0.3, "mlp.down_proj": 0.3}.get(name, 1.0)
            tensors[f"{at}.{name}.weight"] = normal(rows, columns, scale=share * columns**-0.5)
            if biases:
                tensors[f"{at}.{name}.bias"] = normal(rows, scale=0.1)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weight = 1 + normal(h, scale=0.1)
            weight[:: h // 4] *= 8
            tensors[f"{at}.{name}.weight"] = weight
    return tensors


def tiny_model(
    hf: Mapping[str, Any] | None = None, seed: int = 0, biases: bool = False
) -> tuple[StateDict, ModelConfig]:
    return StateDict(tiny_tensors(hf, seed, biases)), load_config({**HF, **(hf or {})})


def tiny_samples(samples: int = 6, length: int = 20, vocabulary: int = 96) -> list[list[int]]:
    random = torch.Generator().manual_seed(7)
    return torch.randint(0, vocabulary, (samples, length), generator=random).tolist()


def options(group_size: int = 32, **changes: Any) -> Options:
    return Options(group_sizes=GroupSizes(group_size, group_size), **changes)


def run_block(source: StateDict, config: ModelConfig, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    weights = load_block(source, config, layer)
    return block(config, layer, weights, hidden, torch.arange(hidden.shape[0]), DenseAttention())
