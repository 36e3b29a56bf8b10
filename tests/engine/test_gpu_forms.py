"""The GPU's forms of a model, their operators computed by the CPU's backends: wiring, not kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_logits import prompts, save

from delivery.checkpoint import Checkpoint
from delivery.engine import graphs
from delivery.engine.assemble import around, assemble, options_for
from delivery.engine.engine_model import Run, load_model
from delivery.engine.forms_cpu import CpuForms, CpuLinear
from delivery.engine.forms_experts import ExpertLayers, QuantizedExperts, StackedExperts
from delivery.engine.forms_gpu import GpuForms
from delivery.engine.options import EngineOptions
from delivery.kernels.row_quant import quantize_rows
from delivery.model import load_config
from delivery.model.config import ModelConfig
from delivery.model.weights import Linear
from delivery.qtensor import QTensor

FAMILIES = ["llama-bias", "phi4-partial", "gemma2", "gemma3", "glm4", "granite"]
EXPERTS = ["mixtral", "qwen2-moe", "qwen3.5-moe"]


@pytest.mark.parametrize("name", [*FAMILIES, *EXPERTS])
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = save(name, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    config = load_config(checkpoint.config)
    with torch.inference_mode():
        model = load_model(checkpoint, config, torch.device("cpu"), GpuForms(torch.float32))
    if config.moe is not None:
        stacked = [model.blocks[layer].experts for layer in config.moe.layers]
        assert all(isinstance(experts, StackedExperts) for experts in stacked)
        assert not any(name.startswith("experts.") for name in model.blocks[-1].linears)
    options = EngineOptions(device="cpu", block_size=8, max_num_batched_tokens=16)
    runner = around(model, options, "cpu", None).runner
    prompt = prompts((33,))[0]
    ours = torch.cat(list(runner.prompt_logits(prompt, range(5), 16)))
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("forms", [GpuForms(torch.bfloat16), CpuForms()], ids=["gpu", "cpu"])
def test_a_tied_table_that_is_cast_is_held_once(forms: Any, tmp_path: Path) -> None:
    save("llama-bias", tmp_path, tie_word_embeddings=True)
    checkpoint = Checkpoint.open(tmp_path)
    assert {checkpoint.info(name).dtype for name in checkpoint.names()} == {"F32"}
    assert not checkpoint.has("lm_head.weight")
    with torch.inference_mode():
        model = load_model(checkpoint, load_config(checkpoint.config), torch.device("cpu"), forms)
    head = model.head.head
    weight = head.packed.data if isinstance(head, CpuLinear) else head.weight
    assert weight.dtype == (torch.float32 if isinstance(head, CpuLinear) else torch.bfloat16)
    assert weight.data_ptr() == model.embedding.table.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_loading_keeps_nothing_that_casting_used(tmp_path: Path) -> None:
    """A float32 checkpoint in 16 bits: its table, 205 MB as stored, is not left with the allocator."""
    save("llama-bias", tmp_path, vocab_size=100_000, hidden_size=512, num_attention_heads=8)
    small = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "cache_max_entry_count": 16, "graphs": False}
    made = assemble(tmp_path, options_for(tmp_path, {"device": "cuda", **small}))
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert unused < 64e6
    assert made.plan.weights_bytes > 100e6


@pytest.mark.parametrize("kind", ["w4-zeros", "w4-symmetric", "w8", "int8", "one by one"])
def test_quantised_experts_are_one_product(kind: str, tmp_path: Path) -> None:
    """The same logits as when the engine runs expert by expert."""
    save("mixtral", tmp_path, hidden_size=64, intermediate_size=128)
    checkpoint = Checkpoint.open(tmp_path)
    config = load_config(checkpoint.config)
    prompt = prompts((33,))[0]
    logits = []
    for together in (True, False):
        forms = QuantizedMixture(torch.float32, "w4-zeros" if kind == "one by one" else kind)
        forms.together = together
        forms.group = 32 if kind == "one by one" else 64
        with torch.inference_mode():
            model = load_model(checkpoint, config, torch.device("cpu"), forms)
        found = model.blocks[0].experts
        assert isinstance(found, QuantizedExperts) == (together and kind != "one by one")
        assert (graphs.why_not(model) is None) == (found is not None)
        runner = around(model, EngineOptions(device="cpu", block_size=8), "cpu", None).runner
        logits.append(torch.cat(list(runner.prompt_logits(prompt, range(5), 40))))
    torch.testing.assert_close(*logits, atol=3e-3, rtol=0)


class QuantizedMixture(GpuForms):
    """The GPU's forms of a model whose experts are quantised."""

    def __init__(self, dtype: torch.dtype, kind: str) -> None:
        super().__init__(dtype)
        self.kind, self.group, self.together = kind, 64, True

    def linear(self, layer: Linear) -> Run:
        return super().linear(self.rounded(layer) if "experts" in layer.name else layer)

    def experts(self, config: ModelConfig, experts: Sequence[ExpertLayers]) -> Any:
        if not self.together:
            return None
        return super().experts(config, [tuple(map(self.rounded, each)) for each in experts])

    def rounded(self, layer: Linear) -> Linear:
        if isinstance(layer.weight, QTensor):
            return layer
        weight = layer.weight.float()
        if self.kind in ("w8", "int8"):
            values, scale = quantize_rows(weight, torch.int8)
            act_dtype = None if self.kind == "w8" else torch.int8
            return Linear(layer.name, QTensor(values, scale, None, -1, 8, act_dtype=act_dtype), None)
        pieces = weight.unflatten(1, (-1, self.group))
        low, high = pieces.amin(-1), pieces.amax(-1)
        if self.kind == "w4-symmetric":
            scale = torch.maximum(-low, high) / 7
            values = (pieces / scale[..., None]).round().to(torch.int8)
            return Linear(layer.name, QTensor(values.flatten(1), scale, None, self.group, 4), None)
        scale = (high - low) / 15
        zero = (-low / scale).round()
        values = (pieces / scale[..., None] + zero[..., None]).round().clamp(0, 15).to(torch.uint8)
        return Linear(
            layer.name, QTensor(values.flatten(1), scale, zero.to(torch.uint8), self.group, 4), None
        )
