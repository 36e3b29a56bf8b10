"""Every family against transformers: tiny seeded models, float32, logits within 1e-4."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import MODELS, build, tensors

from delivery.checkpoint.layouts import source_architectures
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
from delivery.model.rope import frequencies


def logits(hf: dict[str, Any], weights: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    config = load_config(hf)
    source = StateDict(weights)
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
    with torch.no_grad():
        ours = logits(model.config.to_dict(), tensors(model), sequences)
        for sequence, out in zip(sequences, ours, strict=True):
            theirs = model(torch.tensor([sequence])).logits[0]
            assert theirs.abs().max() > 0.5
            torch.testing.assert_close(out, theirs, atol=1e-4, rtol=0)


def test_old_and_new_spellings_of_rope_agree() -> None:
    new = build("llama-llama3").config.to_dict()
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    scaling = dict(new["rope_parameters"])
    old["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    old["rope_scaling"] = scaling
    assert load_config(old) == load_config(new)


def test_gemma3_states_its_two_rotaries_in_two_ways() -> None:
    new = build("gemma3-linear").config.to_dict()
    old = {k: v for k, v in new.items() if k not in ("rope_parameters", "layer_types")}
    old |= {"rope_theta": 50000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6}
    old["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    assert load_config(old) == load_config(new)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_phi3_had_other_names_for_longrope(name: str) -> None:
    new = build("phi3-longrope").config.to_dict()
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    scaling = dict(new["rope_parameters"])
    old |= {"rope_theta": scaling.pop("rope_theta"), "original_max_position_embeddings": 32}
    kept = {k: scaling[k] for k in ("short_factor", "long_factor")}
    old["rope_scaling"] = {**kept, "type": name}
    assert load_config(old) == load_config(new)


def test_architecture_alone_decides() -> None:
    assert family_for({"architectures": ["Qwen3ForCausalLM"], "model_type": "llama"}).name == "qwen3"
    assert "LlamaForCausalLM" in architectures()


def test_the_page_on_convert_lists_every_architecture() -> None:
    page = Path(__file__).parents[2] / "docs" / "steps" / "convert.md"
    classes = r"`(\w+(?:ForCausalLM|ForConditionalGeneration|Model))`"
    listed = set(re.findall(classes, page.read_text("utf-8")))
    assert listed == {*architectures(), *source_architectures()}


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
    weights = tensors(model)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(DataError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_block(StateDict(weights), load_config(model.config.to_dict()), 1)


def test_unknown_rope_scaling_is_named() -> None:
    model = build("llama")
    hf = {
        **model.config.to_dict(),
        "rope_parameters": {"rope_type": "warp", "rope_theta": 1e4, "factor": 2.0},
    }
    with pytest.raises(DataError, match="'warp' is not supported"):
        logits(hf, tensors(model), [[3, 4]])


WRONG = [
    ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers"),
    ("llama", {"hidden_act": ["silu"]}, "hidden_act"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'linear' is incomplete"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' is incomplete"),
    ("llama", {"rope_parameters": {"rope_theta": "10000"}}, "rope_theta"),
    ("llama", {"rope_parameters": {"rope_type": ["linear"], "factor": 2.0}}, r"\['linear'\]"),
    ("phi4-partial", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
    ("llama-yarn", {"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, "factor"),
    ("mistral", {"sliding_window": "4096"}, "sliding_window"),
    ("qwen2-window", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ("qwen2-window", {"layer_types": 3}, "layer_types"),
    ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
    ("qwen3-moe", {"mlp_only_layers": 0.5}, "mlp_only_layers"),
]


@pytest.mark.parametrize(("name", "changes", "named"), WRONG)
def test_a_setting_of_the_wrong_kind_is_named(name: str, changes: dict[str, Any], named: str) -> None:
    hf = {**build(name).config.to_dict(), **changes}
    with pytest.raises(DataError, match=named) as caught:
        frequencies(load_config(hf).rope)
    assert caught.value.code in ("config-invalid", "rope-unknown")


OPTIONAL = ["rms_norm_eps", "head_dim", "num_key_value_heads", "hidden_act", "tie_word_embeddings", "dtype"]
OPTIONAL += ["eos_token_id", "bos_token_id", "rope_scaling", "layer_types", "use_sliding_window"]


@pytest.mark.parametrize("key", [*OPTIONAL, "max_window_layers", "partial_rotary_factor"])
def test_null_is_the_default_of_an_optional_setting(key: str) -> None:
    hf = {**build("qwen2").config.to_dict(), "use_sliding_window": True, "sliding_window": 5}
    silent = {k: v for k, v in hf.items() if k != key}
    assert load_config({**hf, key: None}) == load_config(silent)


@pytest.mark.parametrize("stated", [-1, [2, -1, None, True], "2"])
def test_what_is_no_token_id_ends_no_text(stated: object) -> None:
    hf = build("llama").config.to_dict() | {"eos_token_id": stated}
    assert load_config(hf).eos_token_ids == ((2,) if isinstance(stated, list) else ())
