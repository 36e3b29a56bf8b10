"""What a GGUF file's architecture is called by Hugging Face, and how its tensors are laid out there.

Differences that matter: llama.cpp permutes the rows of Llama's q and k for its own rotary, stores
Gemma's norms as 1 + w, keeps a model's experts in one tensor, and writes the output matrix only
where it is not the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivery.checkpoint.pieces import Piece, same
from delivery.errors import DataError

if TYPE_CHECKING:
    import torch

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_MIXTRAL = {"ffn_gate_inp": "block_sparse_moe.gate"}
_QWEN3_MOE = {"ffn_gate_inp": "mlp.gate"}
_EXPERTS = {
    "mixtral": ("block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("mlp.experts", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
_DERIVED = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short"})
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+(?:\.\d+)?)\.(weight|bias)")
_EXPERT = re.compile(r"ffn_(gate|up|down)(?:_exps|\.(\d+))")

Metadata = Mapping[str, Any]
Take = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Layout:
    """One model class as llama.cpp stores it."""

    architecture: str
    model_type: str
    block: Mapping[str, str]
    permuted: bool = False
    norm_plus_one: bool = False
    """Norms are stored as 1 + w."""


_LLAMA = Layout("LlamaForCausalLM", "llama", _BLOCK, permuted=True)
_LAYOUTS: Mapping[str, Layout] = {
    "llama": _LLAMA,
    "internlm2": _LLAMA,
    "mixtral": Layout("MixtralForCausalLM", "mixtral", _BLOCK | _MIXTRAL, permuted=True),
    "mistral": Layout("MistralForCausalLM", "mistral", _BLOCK, permuted=True),
    "qwen2": Layout("Qwen2ForCausalLM", "qwen2", _BLOCK),
    "qwen3": Layout("Qwen3ForCausalLM", "qwen3", _BLOCK),
    "qwen3moe": Layout("Qwen3MoeForCausalLM", "qwen3_moe", _BLOCK | _QWEN3_MOE),
    "gemma": Layout("GemmaForCausalLM", "gemma", _BLOCK, norm_plus_one=True),
    "gemma2": Layout("Gemma2ForCausalLM", "gemma2", _BLOCK | _SANDWICH, norm_plus_one=True),
    "gemma3": Layout("Gemma3ForCausalLM", "gemma3_text", _BLOCK | _SANDWICH, norm_plus_one=True),
    "phi3": Layout("Phi3ForCausalLM", "phi3", _BLOCK | _PHI3),
}


def gguf_architectures() -> tuple[str, ...]:
    """The values of `general.architecture` that can be read."""
    return tuple(sorted(set(_LAYOUTS) - {"mixtral"}))


def layout_of(metadata: Metadata) -> Layout:
    """The layout of a file. Raises DataError `unknown-architecture`."""
    name = str(metadata.get("general.architecture"))
    if name == "llama" and metadata.get("llama.expert_count", 0) > 0:
        name = "mixtral"
    if name == "llama" and metadata.get("llama.attention.sliding_window"):
        name = "mistral"
    if name not in _LAYOUTS:
        raise DataError(
            "unknown-architecture",
            f"GGUF architecture {name!r} is not supported",
            why=f"supported are {', '.join(gguf_architectures())}",
            hint="use the model's safetensors",
        )
    return _LAYOUTS[name]


def pieces(layout: Layout, config: Mapping[str, Any], names: Iterator[str]) -> Iterator[Piece]:
    """The canonical tensors that a file's tensors become. Raises DataError `gguf-tensor-unknown`."""
    for source in names:
        match = _NAME.fullmatch(source)
        if match is None:
            raise _unknown(source, layout)
        layer, stem, kind = match.groups()
        if stem in _DERIVED:
            continue
        if layer is None:
            if stem not in _TOP:
                raise _unknown(source, layout)
            name = f"{_TOP[stem]}.{kind}"
            yield Piece(name, source, _transform(layout, config, stem), keeps_shape=True)
            continue
        prefix = f"model.layers.{layer}"
        if stem in layout.block:
            name = f"{prefix}.{layout.block[stem]}.{kind}"
            yield Piece(name, source, _transform(layout, config, stem), keeps_shape=True)
        elif (expert := _EXPERT.fullmatch(stem)) and layout.model_type in _EXPERTS:
            yield from _experts(layout, config, prefix, source, expert)
        else:
            raise _unknown(source, layout)


def unpermute(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k (or their bias) back from llama.cpp's order to Hugging Face's.

    values: [heads · head_dim, ...]; llama.cpp interleaves the two halves of each head.
    """
    head_dim = values.shape[0] // heads
    split = values.reshape(heads, head_dim // 2, 2, *values.shape[1:])
    return split.transpose(1, 2).reshape(values.shape)


def _transform(layout: Layout, config: Mapping[str, Any], stem: str) -> Take:
    if layout.permuted and stem in ("attn_q", "attn_k"):
        heads = int(config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"])
        return lambda values: unpermute(values, heads)
    if layout.norm_plus_one and stem.endswith("norm"):
        return lambda values: values.float() - 1
    return same


def _experts(
    layout: Layout, config: Mapping[str, Any], prefix: str, source: str, expert: re.Match[str]
) -> Iterator[Piece]:
    folder, members = _EXPERTS[layout.model_type]
    member, number = members[expert.group(1)], expert.group(2)
    if number is not None:
        yield Piece(f"{prefix}.{folder}.{number}.{member}.weight", source)
        return
    count = int(config.get("num_local_experts") or config["num_experts"])
    for index in range(count):
        name = f"{prefix}.{folder}.{index}.{member}.weight"
        yield Piece(name, source, lambda values, index=index: values[index])  # type: ignore[misc]


def _unknown(source: str, layout: Layout) -> DataError:
    return DataError(
        "gguf-tensor-unknown",
        f"the GGUF file holds the unexpected tensor {source!r}",
        why=f"a {layout.architecture} has no such tensor",
        hint="use the model's safetensors",
    )
