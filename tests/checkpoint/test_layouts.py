"""InternLM2, InternLM3 and ChatGLM become classes of transformers with the same logits.

The published layouts are written here from a model of the target class, the other way round.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_samples as samples
import pytest
import torch
from safetensors.torch import save_file

from delivery.checkpoint import Checkpoint, CheckpointWriter
from delivery.checkpoint.convert import convert, open_source
from delivery.checkpoint.directory_source import DirectorySource
from delivery.checkpoint.layouts import layout_for
from delivery.errors import DataError

IDS = torch.arange(5, 40)[None]
COMMON = {
    "vocab_size": 420,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "auto_map": {"AutoModelForCausalLM": "modeling.X"},
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.clone().contiguous() for n, t in state.items()}, folder / "model.safetensors")
    return folder


def check_logits(folder: Path, out: Path, model: Any) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    source = json.loads((folder / "config.json").read_text())
    layout = layout_for(source)
    directory = DirectorySource(folder, source)
    with CheckpointWriter(out) as writer:
        for piece in layout.pieces(source, iter(directory.names())):
            writer.add(piece.name, piece.take(directory.tensor(piece.source)))
        writer.finish(layout.config(source))
    outline, written = open_source(folder).outline(), Checkpoint.open(out)
    assert outline is not None
    assert {n: outline.shape(n) for n in outline.names()} == {n: written.shape(n) for n in written.names()}
    loaded, report = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    return json.loads((out / "config.json").read_text())


def fuse_internlm2(state: dict[str, torch.Tensor], layer: int, kind: str) -> torch.Tensor:
    """Per key/value head: its two query heads, its key, its value; 16 rows each."""
    q, k, v = (state[f"model.layers.{layer}.self_attn.{p}_proj.{kind}"] for p in "qkv")
    parts = []
    for group in range(2):
        kv = slice(group * 16, group * 16 + 16)
        parts += [q[group * 32 : group * 32 + 32], k[kv], v[kv]]
    return torch.cat(parts)


@pytest.mark.parametrize("bias", [False, True])
def test_internlm2(bias: bool, tmp_path: Path) -> None:
    model = samples.tiny("Llama", attention_bias=bias, rope_theta=10000.0)
    old = {
        "model.embed_tokens": "model.tok_embeddings",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "lm_head": "output",
    }
    full = model.state_dict()
    state = {}
    for name, tensor in full.items():
        for new, published in old.items():
            name = name.replace(new, published)
        if "_proj" not in name:
            state[name] = tensor
    for layer in range(2):
        for kind in ("weight", "bias") if bias else ("weight",):
            state[f"model.layers.{layer}.attention.wqkv.{kind}"] = fuse_internlm2(full, layer, kind)
    config = {
        **COMMON,
        "architectures": ["InternLM2ForCausalLM"],
        "model_type": "internlm2",
        "bias": bias,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    written = check_logits(save(tmp_path / "source", config, state), tmp_path / "out", model)
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in written
    opened = open_source(tmp_path / "source")
    convert(opened, tmp_path / "converted", 10**9, lambda done: None)
    assert Checkpoint.open(tmp_path / "converted").config == written
    assert opened.notes[0] == "InternLM2ForCausalLM written as LlamaForCausalLM"


@pytest.mark.parametrize(
    ("qkv_bias", "bias", "family"), [(False, False, "Llama"), (True, True, "Llama"), (True, False, "Qwen2")]
)
def test_internlm3(qkv_bias: bool, bias: bool, family: str, tmp_path: Path) -> None:
    biases = {"attention_bias": bias, "mlp_bias": bias} if family == "Llama" else {}
    model = samples.tiny(family, rope_theta=10000.0, **biases)
    config = {
        **COMMON,
        "architectures": ["InternLM3ForCausalLM"],
        "model_type": "internlm3",
        "qkv_bias": qkv_bias,
        "bias": bias,
        "head_dim": 16,
        "hidden_act": "silu",
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    written = check_logits(save(tmp_path / "source", config, model.state_dict()), tmp_path / "out", model)
    assert written["architectures"] == [f"{family}ForCausalLM"]


def test_internlm3_of_a_form_never_published(tmp_path: Path) -> None:
    config = {**COMMON, "architectures": ["InternLM3ForCausalLM"], "bias": True, "qkv_bias": False}
    folder = save(tmp_path / "source", config, {"x": torch.ones(1)})
    with pytest.raises(DataError, match="biases on all layers but q, k and v"):
        open_source(folder)


def chatglm_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "auto_map": {"AutoModel": "modeling_chatglm.X"},
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_residual_connection_post_layernorm": False,
        "ffn_hidden_size": 96,
        "hidden_size": 64,
        "kv_channels": 16,
        "layernorm_epsilon": 1e-5,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "num_attention_heads": 4,
        "num_layers": 2,
        "original_rope": True,
        "padded_vocab_size": 420,
        "post_layer_norm": True,
        "rmsnorm": True,
        "rope_ratio": 5,
        "seq_length": 64,
        "vocab_size": 420,
        "tie_word_embeddings": False,
        "eos_token_id": [2],
        "pad_token_id": 2,
        **changes,
    }


@pytest.mark.parametrize("grouped", [True, False])
def test_chatglm(grouped: bool, tmp_path: Path) -> None:
    heads = 2 if grouped else 4
    model = samples.tiny(
        "Glm",
        num_key_value_heads=heads,
        head_dim=16,
        attention_bias=True,
        rms_norm_eps=1e-5,
        rope_theta=50000.0,
        pad_token_id=2,
        eos_token_id=[2],
    )
    full = model.state_dict()
    state = {
        "transformer.embedding.word_embeddings.weight": full["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": full["model.norm.weight"],
        "transformer.output_layer.weight": full["lm_head.weight"],
        "transformer.rotary_pos_emb.inv_freq": torch.ones(4),
    }
    for layer in range(2):
        new, old = f"model.layers.{layer}", f"transformer.encoder.layers.{layer}"
        for a, b in (
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ):
            state[f"{old}.{b}.weight"] = full[f"{new}.{a}.weight"]
        for kind in ("weight", "bias"):
            q, k, v = (full[f"{new}.self_attn.{p}_proj.{kind}"] for p in "qkv")
            rows = [q, k, v] if grouped else [t[i * 16 : i * 16 + 16] for i in range(4) for t in (q, k, v)]
            state[f"{old}.self_attention.query_key_value.{kind}"] = torch.cat(rows)
    config = chatglm_config(multi_query_attention=grouped)
    written = check_logits(save(tmp_path / "source", config, state), tmp_path / "out", model)
    assert written["num_key_value_heads"] == heads
    assert written["rope_theta"] == 50000.0


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (chatglm_config(rmsnorm=False), "rmsnorm is False, expected True"),
        (chatglm_config(add_bias_linear=True), "add_bias_linear is True, expected False"),
        (chatglm_config(quantization_bit=4), "quantization_bit is 4, expected 0"),
        ({"architectures": ["ChatGLMModel"], "inner_hidden_size": 64}, "as the first ChatGLM-6B's does"),
    ],
)
def test_other_chatglms_are_refused(config: dict, why: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "source", config, {"x": torch.ones(1)})
    with pytest.raises(DataError, match="cannot be converted") as caught:
        open_source(folder)
    assert why in caught.value.why


def test_a_checkpoint_that_has_to_be_converted_says_so(tmp_path: Path) -> None:
    folder = save(tmp_path / "source", chatglm_config(), {"x": torch.ones(1)})
    with pytest.raises(DataError, match=r"has to be converted first[\s\S]*deliver convert"):
        Checkpoint.open(folder)
