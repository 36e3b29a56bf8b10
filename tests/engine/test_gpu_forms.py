"""The GPU's forms of a model, their operators computed by the CPU's backends: wiring, not kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_engine_logits import prompts, save

from delivery.checkpoint import Checkpoint
from delivery.engine.assemble import around
from delivery.engine.engine_model import Run, load_model
from delivery.engine.forms_experts import StackedExperts
from delivery.engine.forms_gpu import GateUp, GpuForms
from delivery.engine.options import EngineOptions
from delivery.kernels.row_quant import quantize_rows
from delivery.model import load_config
from delivery.model.config import ModelConfig
from delivery.model.weights import Fused, Linear
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


def test_gate_and_up_in_eight_bits_are_one_product_with_their_activation(tmp_path: Path) -> None:
    """Rows in turns, norm in front and down projection behind in 8 bits: the same logits as apart."""
    save("qwen2", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    config = load_config(checkpoint.config)
    prompt = prompts((33,))[0]
    logits = []
    for kind in (EightBits, EightBitsApart):
        forms = kind(torch.float32)
        with torch.inference_mode():
            model = load_model(checkpoint, config, torch.device("cpu"), forms)
        runner = around(model, EngineOptions(device="cpu", block_size=8), "cpu", None).runner
        logits.append(torch.cat(list(runner.prompt_logits(prompt, range(5), 40))))
        product = model.blocks[0].products["gate_proj", "up_proj"]
        assert isinstance(product, GateUp if kind is EightBits else Fused)
        assert model.blocks[0].norms["pre_mlp_norm"].quantize == torch.int8
        assert model.blocks[0].gated.quantize == torch.int8
    torch.testing.assert_close(*logits, atol=2e-3, rtol=0)


class EightBits(GpuForms):
    """The GPU's forms of a model whose layers are all rounded to int8."""

    def linear(self, layer: Linear) -> Run:
        return super().linear(rounded(layer))

    def gate_up(self, config: ModelConfig, layer: Linear) -> GateUp | None:
        return super().gate_up(config, rounded(layer))


class EightBitsApart(EightBits):
    def gate_up(self, config: ModelConfig, layer: Linear) -> None:
        return None


def rounded(layer: Linear) -> Linear:
    values, scale = quantize_rows(layer.weight.float(), torch.int8)
    weight = QTensor(values, scale, None, -1, 8, act_dtype=torch.int8)
    return Linear(layer.name, weight, layer.bias)
