"""InternLM2, InternLM3 and ChatGLM as published, converted, in the engine: the publisher's own logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import published_layouts as published
import pytest
import torch
from safetensors.torch import save_file

from delivery.checkpoint.convert import convert, open_source
from delivery.engine import LLM, SamplingParams

MODELS: dict[str, tuple[published.Forward, tuple[dict[str, Any], published.State]]] = {
    "internlm2": (published.internlm2, published.internlm2_model()),
    "internlm2-bias": (published.internlm2, published.internlm2_model(bias=True)),
    "internlm3": (published.internlm3, published.internlm3_model()),
    "chatglm": (published.chatglm, published.chatglm_model()),
    "chatglm-ungrouped": (published.chatglm, published.chatglm_model(grouped=False)),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text_are_the_publishers(name: str, tmp_path: Path) -> None:
    forward, (config, state) = MODELS[name]
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_file(state, source / "model.safetensors")
    convert(open_source(source), tmp_path / "out", 10**9, lambda done: None)
    prompt = torch.randint(3, 99, (33,), generator=torch.Generator().manual_seed(3)).tolist()
    with LLM(tmp_path / "out", block_size=8, max_num_batched_tokens=16) as llm:
        ours = torch.cat(list(llm.logits(prompt)))
        made = llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))[0]
    torch.testing.assert_close(ours, forward(config, state, prompt), atol=1e-4, rtol=0)
    theirs = forward(config, state, [*prompt, *made.token_ids])[len(prompt) - 1 : -1]
    assert theirs.argmax(-1).tolist() == made.token_ids
