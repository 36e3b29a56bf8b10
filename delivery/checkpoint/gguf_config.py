"""A Hugging Face config rebuilt from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from delivery.checkpoint.gguf_layout import Layout, layout_of
from delivery.errors import DataError

if TYPE_CHECKING:
    from delivery.checkpoint.gguf_parts import GgufParts

_ACTIVATIONS = {
    "gemma": "gelu_pytorch_tanh",
    "gemma2": "gelu_pytorch_tanh",
    "gemma3_text": "gelu_pytorch_tanh",
}


def rebuild_config(file: GgufParts, dtype: str) -> dict[str, Any]:
    """`config.json` of the model in a GGUF file; `dtype` is what the weights are stored as.

    Raises DataError `gguf-metadata-missing`, `gguf-rope-unknown`, `unknown-architecture`.
    """
    layout = layout_of(file.metadata)
    get = _Keys(file)
    heads = get.count("attention.head_count")
    hidden = get.count("embedding_length")
    head_dim = get.count("attention.key_length", get.count("rope.dimension_count", hidden // heads))
    if "token_embd.weight" not in file.tensors:
        raise DataError("missing-weight", f"{file.path.name} has no tensor token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [layout.architecture],
        "model_type": layout.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": get.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": int(get("feed_forward_length", 0)),
        "max_position_embeddings": get.count("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    activation = _ACTIVATIONS.get(layout.model_type, "silu")
    config["hidden_act"] = activation
    if layout.model_type.startswith("gemma"):
        config["hidden_activation"] = activation
    # Stated even where absent, or a class would fill in its own.
    config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | _token_ids(file.metadata)
    config |= _rope(file, get, layout, head_dim)
    config |= _particular(file, get, layout, config)
    return config


def rebuild_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`generation_config.json`: the token ids; sampling settings are not in a GGUF file."""
    ids = _token_ids(metadata)
    end = [ids[k] for k in ("eos_token_id",) if k in ids]
    for key in ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"):
        if isinstance(metadata.get(key), int) and metadata[key] not in end:
            end.append(metadata[key])
    return ids | ({"eos_token_id": end[0] if len(end) == 1 else end} if end else {})


class _Keys:
    """Metadata of the file's own architecture; floats as they were before they were stored in 32 bits."""

    def __init__(self, file: GgufParts) -> None:
        self._metadata = file.metadata
        self._prefix = str(file.metadata["general.architecture"])

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{self._prefix}.{key}", default)
        if value is None:
            raise DataError(
                "gguf-metadata-missing",
                f"the GGUF file lacks the key {self._prefix}.{key}",
                hint="convert the model to GGUF again with a current llama.cpp",
            )
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number. Raises DataError `gguf-metadata-missing`, `config-invalid`."""
        value = self(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise DataError(
                "config-invalid",
                f"{self._prefix}.{key} of the GGUF file is wrong",
                why=f"expected a positive whole number for all layers, got {value!r:.80}",
                hint="use the model's safetensors",
            )
        return value

    def has(self, key: str) -> bool:
        return f"{self._prefix}.{key}" in self._metadata


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {k: metadata.get(f"tokenizer.ggml.{v}_token_id") for k, v in names.items()}
    return {k: v for k, v in found.items() if isinstance(v, int)}


def _particular(file: GgufParts, get: _Keys, layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
    kind = layout.model_type
    if kind in ("llama", "mistral"):
        bias = "blk.0.attn_q.bias" in file.tensors
        return _window(get) | ({"attention_bias": bias, "mlp_bias": False} if kind == "llama" else {})
    if kind == "mixtral":
        return {
            "num_local_experts": get.count("expert_count"),
            "num_experts_per_tok": get.count("expert_used_count"),
        }
    if kind == "qwen3_moe":
        return {
            "num_experts": get.count("expert_count"),
            "num_experts_per_tok": get.count("expert_used_count"),
            "moe_intermediate_size": get.count("expert_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": False,
        }
    if kind in ("qwen2", "qwen3"):
        return {"use_sliding_window": False} | ({"attention_bias": False} if kind == "qwen3" else {})
    if kind == "gemma2":
        return _window(get) | {
            "attn_logit_softcapping": get("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": get("final_logit_softcapping", 30.0),
            "query_pre_attn_scalar": _query_scalar(config),
        }
    if kind == "gemma3_text":
        return _window(get) | {
            "query_pre_attn_scalar": _query_scalar(config),
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
            "layer_types": [
                "full_attention" if (i + 1) % 6 == 0 else "sliding_attention"
                for i in range(config["num_hidden_layers"])
            ],
        }
    return _window(get)


def _query_scalar(config: Mapping[str, Any]) -> int:
    """Gemma 2 and 3 of 27B (recognised as llama.cpp does, by their depth) scale by hidden / heads."""
    if config["num_hidden_layers"] in (46, 62):
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _window(get: _Keys) -> dict[str, Any]:
    key = "attention.sliding_window"
    return {"sliding_window": int(get(key))} if get.has(key) and int(get(key)) > 0 else {}


def _rope(file: GgufParts, get: _Keys, layout: Layout, head_dim: int) -> dict[str, Any]:
    if "rope_freqs.weight" in file.tensors:
        theta = get("rope.freq_base", 10000.0)
        return {"rope_scaling": _llama3_scaling(file.read("rope_freqs.weight"), theta, head_dim)}
    if "rope_factors_long.weight" in file.tensors:
        return {
            "original_max_position_embeddings": get.count("rope.scaling.original_context_length"),
            "partial_rotary_factor": get.count("rope.dimension_count", head_dim) / head_dim,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": _floats(file.read("rope_factors_long.weight")),
                "short_factor": _floats(file.read("rope_factors_short.weight")),
            },
        }
    if not get.has("rope.scaling.type") or get("rope.scaling.type") == "none":
        if layout.model_type == "phi3" and get.has("rope.dimension_count"):
            return {"partial_rotary_factor": get.count("rope.dimension_count") / head_dim}
        return {}
    kind = get("rope.scaling.type")
    scaling: dict[str, Any] = {"rope_type": kind, "type": kind, "factor": get("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = get.count("rope.scaling.original_context_length")
    elif kind != "linear":
        raise DataError(
            "gguf-rope-unknown",
            f"rope scaling {kind!r} of {file.path.name} is not supported",
            why="supported are linear, yarn, llama3 and longrope",
        )
    return {"rope_scaling": scaling}


def _llama3_scaling(factors: Any, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, recovered from the per-frequency factors that llama.cpp stores instead.

    All parameters but `factor` are published constants; they are checked against the file's factors.
    """
    low, high, original = 1.0, 4.0, 8192
    factor = float(np.max(factors))
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = original * frequency / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if expected.shape != factors.shape or not np.allclose(expected, factors, rtol=1e-3):
        raise DataError(
            "gguf-rope-unknown",
            "the rope factors of this GGUF file are not Llama 3's",
            why=f"expected factors for theta {theta:g}, factor {factor:g}, original length {original}",
            hint="use the model's safetensors",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _floats(values: Any) -> list[float]:
    return [float(str(v)) for v in np.asarray(values, np.float32)]
