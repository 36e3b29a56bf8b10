"""The GPU's forms of a model, their operators computed by the CPU's backends: wiring, not kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_engine_logits import prompts, save

from delivery.checkpoint import Checkpoint
from delivery.engine.assemble import around
from delivery.engine.engine_model import load_model
from delivery.engine.forms_experts import StackedExperts
from delivery.engine.forms_gpu import GpuForms
from delivery.engine.options import EngineOptions
from delivery.model import load_config

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
