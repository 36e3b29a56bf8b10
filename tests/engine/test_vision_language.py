"""Vision-language checkpoints: text through the language tower, everything else untouched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import torch

from delivery.checkpoint import Checkpoint
from delivery.checkpoint.convert import convert, open_source
from delivery.engine import LLM
from delivery.errors import DataError
from delivery.model import load_config
from delivery.model.families import families

IDS = (torch.arange(33) * 7 % 90 + 3).tolist()


@pytest.mark.parametrize("name", families()["vision_language"].architectures)
def test_text_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = tiny_vision.build(name)
    model.save_pretrained(tmp_path / "source")
    convert(open_source(tmp_path / "source"), tmp_path / "out", 10**9, lambda done: None)
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([IDS])).logits[0]
    with LLM(tmp_path / "out", block_size=8, max_num_batched_tokens=16) as llm:
        ours = torch.cat(list(llm.logits(IDS)))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    source, out = Checkpoint.open(tmp_path / "source"), Checkpoint.open(tmp_path / "out")
    assert out.names() == source.names()
    for tensor in source.names():
        assert torch.equal(out.tensor(tensor), source.tensor(tensor))


def test_a_vision_tower_may_have_another_dtype(tmp_path: Path) -> None:
    model = tiny_vision.build("LlavaForConditionalGeneration").to(torch.bfloat16)
    model.model.multi_modal_projector.float()
    model.save_pretrained(tmp_path / "source")
    convert(open_source(tmp_path / "source"), tmp_path / "out", 10**9, lambda done: None)
    out = Checkpoint.open(tmp_path / "out")
    assert out.info("multi_modal_projector.linear_1.weight").dtype == "F32"
    assert out.info("language_model.model.layers.0.mlp.up_proj.weight").dtype == "BF16"


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Qwen2-VL's first published form: the tower's settings among the others, no text_config."""
    text = dict(config["text_config"])
    rope = text.pop("rope_parameters")
    kept = {k: v for k, v in config.items() if k != "text_config"}
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    return {**text, **kept, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def test_a_tower_whose_settings_stand_among_the_others() -> None:
    nested = tiny_vision.config("Qwen2VLForConditionalGeneration").to_dict()
    nested["architectures"] = ["Qwen2VLForConditionalGeneration"]
    assert load_config(flat(nested)) == load_config(nested)
    assert load_config(nested).tie_embeddings


def test_defaults_of_the_towers_class_fill_a_short_text_config() -> None:
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    hf = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text, "torch_dtype": "float16"}
    config = load_config(hf)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.head_dim) == (4096, 32, 32, 128)
    assert (config.vocab_size, config.max_position, config.dtype) == (32064, 4096, "float16")


def test_an_unknown_tower_is_named(tmp_path: Path) -> None:
    hf = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "opt"}}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(DataError, match=r"unknown kind 'opt'[\s\S]*llama"):
        load_config(hf)
