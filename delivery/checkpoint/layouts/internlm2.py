"""InternLM2: Llama's mathematics with fused `wqkv`; becomes a Llama checkpoint.

`wqkv` holds, for each key/value head, its query heads, then the key, then the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from delivery.checkpoint.layouts._config import renamed
from delivery.checkpoint.pieces import Piece

if TYPE_CHECKING:
    import torch

ARCHITECTURES = ("InternLM2ForCausalLM",)

_NAMES = {
    "model.tok_embeddings": "model.embed_tokens",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "model.norm": "model.norm",
    "output": "lm_head",
}
_FUSED = re.compile(r"(model\.layers\.\d+)\.attention\.wqkv\.(weight|bias)")
_LAYER = re.compile(r"(?:(model\.layers\.\d+)\.)?(.+)\.(weight|bias)")


def config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A LlamaConfig of the same sizes."""
    bias = bool(hf.get("bias", False))
    head_dim = hf["hidden_size"] // hf["num_attention_heads"]
    return renamed(hf, "LlamaForCausalLM", "llama", drop=("bias", "attn_implementation")) | {
        "attention_bias": bias,
        "mlp_bias": False,
        "head_dim": head_dim,
    }


def pieces(hf: Mapping[str, Any], names: Iterator[str]) -> Iterator[Piece]:
    """Canonical tensors; `wqkv` becomes three."""
    heads, groups = int(hf["num_attention_heads"]), int(hf.get("num_key_value_heads") or 0)
    groups = groups or heads
    head_dim = int(hf["hidden_size"]) // heads
    for name in names:
        if fused := _FUSED.fullmatch(name):
            for part in ("q", "k", "v"):
                yield Piece(
                    f"{fused[1]}.self_attn.{part}_proj.{fused[2]}",
                    name,
                    lambda values, part=part: split_wqkv(values, part, heads // groups, head_dim),  # type: ignore[misc]
                )
        elif match := _LAYER.fullmatch(name):
            layer, stem, kind = match.groups()
            canonical = _NAMES.get(stem, stem)
            yield Piece(".".join(filter(None, (layer, canonical, kind))), name)


def split_wqkv(fused: torch.Tensor, part: str, queries_per_group: int, head_dim: int) -> torch.Tensor:
    """Rows of q, k or v from [groups · (queries + 2) · head_dim, ...]."""
    grouped = fused.reshape(-1, queries_per_group + 2, head_dim, *fused.shape[1:])
    taken = {
        "q": grouped[:, :queries_per_group],
        "k": grouped[:, queries_per_group],
        "v": grouped[:, queries_per_group + 1],
    }[part]
    return taken.reshape(-1, *fused.shape[1:])
