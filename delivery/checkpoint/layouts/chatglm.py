"""ChatGLM2, ChatGLM3 and GLM-4 as first published; becomes a checkpoint of transformers' Glm class.

Rotary pairs neighbouring features over half of each head in both. ChatGLM-6B (the first) has another
architecture under the same class name and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from delivery.checkpoint.layouts._config import renamed
from delivery.checkpoint.pieces import Piece
from delivery.errors import DataError

if TYPE_CHECKING:
    import torch

ARCHITECTURES = ("ChatGLMModel", "ChatGLMForConditionalGeneration")

_TOP = {
    "transformer.embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "transformer.encoder.final_layernorm.weight": "model.norm.weight",
    "transformer.output_layer.weight": "lm_head.weight",
}
_BLOCK = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "self_attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.gate_up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}
_LAYER = re.compile(r"transformer\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_QKV = "self_attention.query_key_value"
_DERIVED = "transformer.rotary_pos_emb.inv_freq"
_RENAMED = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "padded_vocab_size": "vocab_size",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
    "add_qkv_bias": "attention_bias",
}
_DROPPED = (
    "add_bias_linear",
    "apply_query_key_layer_scaling",
    "apply_residual_connection_post_layernorm",
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "fp32_residual_connection",
    "hidden_dropout",
    "multi_query_attention",
    "multi_query_group_num",
    "original_rope",
    "post_layer_norm",
    "pre_seq_len",
    "prefix_projection",
    "quantization_bit",
    "rmsnorm",
    "rope_ratio",
    "vocab_size",
)
_EXPECTED = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": False,
    "quantization_bit": 0,
}


def config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A GlmConfig of the same sizes. Raises DataError `layout-unsupported`."""
    if "num_layers" not in hf or "kv_channels" not in hf:
        raise _unsupported("its config lacks num_layers and kv_channels, as the first ChatGLM-6B's does")
    for key, expected in _EXPECTED.items():
        if hf.get(key, expected) != expected:
            raise _unsupported(f"{key} is {hf[key]!r}, expected {expected!r}")
    return renamed(hf, "GlmForCausalLM", "glm", drop=_DROPPED, rename=_RENAMED) | {
        "vocab_size": int(hf["padded_vocab_size"]),
        "num_key_value_heads": _groups(hf),
        "rope_theta": 10000.0 * float(hf.get("rope_ratio", 1)),
        "partial_rotary_factor": 0.5,
        "hidden_act": "silu",
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
    }


def pieces(hf: Mapping[str, Any], names: Iterator[str]) -> Iterator[Piece]:
    """Canonical tensors; query_key_value becomes three. Raises DataError `layout-unsupported`."""
    for name in names:
        match = _LAYER.fullmatch(name)
        if name in _TOP:
            yield Piece(_TOP[name], name)
        elif match and match[2] in _BLOCK:
            yield Piece(f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}", name)
        elif match and match[2] == _QKV:
            for part in ("q", "k", "v"):
                yield Piece(
                    f"model.layers.{match[1]}.self_attn.{part}_proj.{match[3]}",
                    name,
                    lambda values, part=part: split_qkv(values, part, hf),  # type: ignore[misc]
                )
        elif name != _DERIVED:
            raise _unsupported(f"it holds the unexpected tensor {name!r}")


def split_qkv(fused: torch.Tensor, part: str, hf: Mapping[str, Any]) -> torch.Tensor:
    """Rows of q, k or v: three consecutive blocks, or, without grouped queries, three per head."""
    heads, head_dim = int(hf["num_attention_heads"]), int(hf["kv_channels"])
    if not hf.get("multi_query_attention", False):
        per_head = fused.reshape(heads, 3, head_dim, *fused.shape[1:])
        return per_head[:, "qkv".index(part)].reshape(heads * head_dim, *fused.shape[1:])
    q, kv = heads * head_dim, _groups(hf) * head_dim
    begin, end = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}[part]
    return fused[begin:end]


def _groups(hf: Mapping[str, Any]) -> int:
    grouped = hf.get("multi_query_attention", False)
    return int(hf["multi_query_group_num"] if grouped else hf["num_attention_heads"])


def _unsupported(why: str) -> DataError:
    return DataError(
        "layout-unsupported",
        "this ChatGLM checkpoint cannot be converted",
        why=why,
        hint="ChatGLM2, ChatGLM3 and GLM-4 can",
    )
