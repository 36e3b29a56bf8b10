"""GGUF files of tiny seeded models, written as llama.cpp lays them out, by this test's own mapping."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer

BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of Llama's q and k rows: feature i of a head next to feature i + half."""
    out = np.empty_like(weight)
    head_dim = weight.shape[0] // heads
    for head in range(heads):
        for i in range(head_dim):
            target = 2 * i if i < head_dim // 2 else 2 * (i - head_dim // 2) + 1
            out[head * head_dim + target] = weight[head * head_dim + i]
    return out


def write(
    path: Path,
    model: Any,
    architecture: str,
    *,
    tokenizer: Tokenizer | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tokenizer_keys: dict[str, Any] | None = None,
    tensors_a_file: int = 0,
) -> Path:
    """A transformers model as GGUF; matrices are stored as `kind`. tensors_a_file: 0 for all in one."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_file)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    extra(writer)
    if tokenizer is not None:
        write_tokenizer(writer, tokenizer, **(tokenizer_keys or {}))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if ".experts." in name:
            layer = name.split(".")[2]
            both = {"gate": values[:, : values.shape[1] // 2], "up": values[:, values.shape[1] // 2 :]}
            for part, stack in (both if "gate_up" in name else {"down": values}).items():
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", np.ascontiguousarray(stack))
            continue
        target = gguf_name(name, sandwich="gemma2" in architecture or "gemma3" in architecture)
        if architecture in ("llama", "mistral") and (".attn_q." in target or ".attn_k." in target):
            heads = config.num_attention_heads if ".attn_q." in target else config.num_key_value_heads
            values = permute(values, heads)
        if architecture.startswith("gemma") and "norm" in target:
            values = values + np.float32(1)
        if values.ndim > 1 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(target, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str, sandwich: bool) -> str:
    stem, _, leaf = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{leaf}"
    _, _, layer, rest = stem.split(".", 3)
    table = {**BLOCK, **SANDWICH} if sandwich else BLOCK
    return f"blk.{layer}.{table[rest]}.{leaf}"


def write_tokenizer(
    writer: gguf.GGUFWriter,
    tokenizer: Tokenizer,
    *,
    model: str = "gpt2",
    pre: str = "gpt-2",
    special: int = 5,
    vocab_size: int | None = None,
    **keys: Any,
) -> None:
    """The first `special` tokens are control tokens: <s>, </s>, <unk>, ..."""
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), vocab_size or 0)]
    kinds = [3 if i < special else 6 if t.startswith("<0x") else 1 for i, t in enumerate(tokens)]
    kinds[len(vocab) :] = [5] * (len(tokens) - len(vocab))
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    if model == "gpt2":
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges_of(tokenizer))
    else:
        # SentencePiece scores: the earlier a token was merged, the higher.
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(value)


def merges_of(tokenizer: Tokenizer) -> list[str]:
    import json

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [m if isinstance(m, str) else " ".join(m) for m in merges]


def tiny(name: str, **changes: Any) -> Any:
    """A seeded transformers model with grouped queries; norms are not all ones."""
    import transformers

    torch.manual_seed(7)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 420,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = config_class(**{**sizes, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape)
    return model
