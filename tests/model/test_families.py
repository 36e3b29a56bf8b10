"""Every family against transformers: tiny seeded models, float32, logits within 1e-4."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from delivery.errors import DataError
from delivery.model import (
    DenseAttention,
    StateDict,
    block,
    embed,
    final_logits,
    load_block,
    load_config,
    load_ends,
)
from delivery.model.families import architectures, family_for

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


def build(name: str, **changes: Any) -> transformers.PreTrainedModel:
    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    config.architectures = [f"{family}ForCausalLM"]
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start as zeros and ones: make them tell
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def logits(
    hf: dict[str, Any], tensors: dict[str, torch.Tensor], sequences: list[list[int]]
) -> list[torch.Tensor]:
    config = load_config(hf)
    source = StateDict(tensors)
    ends = load_ends(source, config)
    lengths = [len(s) for s in sequences]
    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden = embed(config, ends.table, torch.tensor([token for s in sequences for token in s]))
    mix = DenseAttention(lengths)
    for layer in range(config.num_layers):
        hidden = block(config, layer, load_block(source, config, layer), hidden, positions, mix)
    return list(final_logits(config, ends.norm, ends.head, hidden).split(lengths))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str) -> None:
    model = build(name)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(3, 99, (n,), generator=generator).tolist() for n in (19, 1, 70)]
    tensors = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight" or not tied(model)}
    with torch.no_grad():
        ours = logits(model.config.to_dict(), tensors, sequences)
        for sequence, out in zip(sequences, ours, strict=True):
            theirs = model(torch.tensor([sequence])).logits[0]
            assert theirs.abs().max() > 0.5
            torch.testing.assert_close(out, theirs, atol=1e-4, rtol=0)


def tied(model: transformers.PreTrainedModel) -> bool:
    return bool(model.config.tie_word_embeddings)


def test_old_and_new_spellings_of_rope_agree() -> None:
    new = build("llama-llama3").config.to_dict()
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    scaling = dict(new["rope_parameters"])
    old["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    old["rope_scaling"] = scaling
    assert load_config(old) == load_config(new)


def test_architecture_alone_decides() -> None:
    assert family_for({"architectures": ["Qwen3ForCausalLM"], "model_type": "llama"}).name == "qwen3"
    assert "LlamaForCausalLM" in architectures()


def test_unknown_architecture_names_the_supported_ones() -> None:
    with pytest.raises(DataError, match="LlamaForCausalLM") as caught:
        load_config({"architectures": ["BertModel"]})
    assert caught.value.code == "unknown-architecture"


def test_config_without_architectures_is_refused() -> None:
    with pytest.raises(DataError, match="does not say what the model is"):
        load_config({"model_type": "llama"})


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_missing_number_is_named(key: str) -> None:
    hf = build("llama").config.to_dict()
    del hf[key]
    with pytest.raises(DataError, match=f"{key} is wrong or missing"):
        load_config(hf)


def test_missing_tensor_is_named() -> None:
    model = build("llama")
    tensors = dict(model.state_dict())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(DataError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_block(StateDict(tensors), load_config(model.config.to_dict()), 1)


def test_unknown_rope_scaling_is_named() -> None:
    model = build("llama")
    hf = {
        **model.config.to_dict(),
        "rope_parameters": {"rope_type": "warp", "rope_theta": 1e4, "factor": 2.0},
    }
    with pytest.raises(DataError, match="'warp' is not supported"):
        logits(hf, dict(model.state_dict()), [[3, 4]])
