"""The build step: the artifact that it writes, what it says, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quantize_fixtures import context

from delivery.engine import LLM, SamplingParams
from delivery.errors import EnvironmentLacking
from delivery.steps import step_class
from delivery.steps.build import Build
from delivery.steps.step import Ahead


def test_build_writes_an_engine_that_generates(tiny_checkpoint: Path, tmp_path: Path) -> None:
    ctx = context(tmp_path, "engine", checkpoint=tiny_checkpoint)
    Build(checkpoint="m", max_session_len=96, kv="int8").run(ctx)
    about = json.loads((ctx.out / "engine.json").read_text())
    assert about["max_model_len"] == 96
    assert about["build"]["checkpoint"] == ctx.input("checkpoint").digest
    assert ctx.metrics["weights_bytes"] == about["plan"]["weights_bytes"] > 0
    with LLM(ctx.out) as llm:
        assert len(llm.generate(["hello"], SamplingParams(max_tokens=3, temperature=0.0))[0].token_ids) == 3


def test_what_cannot_fit_is_refused_before_anything_is_written(tiny_checkpoint: Path, tmp_path: Path) -> None:
    ctx = context(tmp_path, "engine", checkpoint=tiny_checkpoint)
    with pytest.raises(EnvironmentLacking, match="does not fit into memory"):
        Build(checkpoint="m", max_session_len=512, cache_max_entry_count=3).run(ctx)
    assert not list(ctx.out.iterdir())


def test_shrunken_sessions_are_said(tiny_checkpoint: Path, tmp_path: Path) -> None:
    ctx = context(tmp_path, "engine", checkpoint=tiny_checkpoint)
    Build(checkpoint="m", cache_max_entry_count=3).run(ctx)
    assert "sessions are limited to 192 tokens; the model's 512 do not fit" in ctx.texts("info")


def test_peak_is_predicted(tiny_checkpoint: Path) -> None:
    predicted = Build().predict_peak({"checkpoint": [Ahead("convert", {}, tiny_checkpoint)]})
    assert predicted is not None
    assert predicted.host_bytes > (tiny_checkpoint / "model.safetensors").stat().st_size
    assert Build().predict_peak({}) is None


def test_step_is_found_by_name() -> None:
    assert step_class("build") is Build
