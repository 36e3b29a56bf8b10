"""The embedding table in 4 bits: only where it is asked for, only in the format that has a place for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantize_fixtures import Context, context, write_checkpoint

from delivery.checkpoint import Checkpoint
from delivery.engine import LLM, build
from delivery.errors import UsageError
from delivery.model import load_config, load_ends
from delivery.qtensor import QTensor
from delivery.quantization import quantize
from delivery.quantization.embedding import EmbeddingPlan, WithEmbedding, quantize_embedding
from delivery.quantization.options import Options
from delivery.quantization.walk import start_stream
from delivery.steps.quantize import Quantize

TABLE = "model.embed_tokens"
SIZES = "attention=64,mlp=128,embedding=32"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tied = request.param
    return write_checkpoint(tmp_path_factory.mktemp("m") / "m", tie_word_embeddings=tied)


def run(folder: Path, model: Path, **settings: Any) -> Context:
    ctx = context(folder, "q", checkpoint=model)
    Quantize(checkpoint="m", **{"scheme": "rtn-w4a16", "group_size": SIZES, **settings}).run(ctx)
    return ctx


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_table_is_rounded_like_any_weight_and_replaces_the_float_one(
    model: Path, symmetric: bool, tmp_path: Path
) -> None:
    ctx = run(tmp_path, model, format="deliver", symmetric=symmetric)
    written, source = Checkpoint.open(ctx.out), Checkpoint.open(model)
    assert not written.has(f"{TABLE}.weight")
    found = written.weight(TABLE)
    assert isinstance(found, QTensor)
    right = quantize(source.tensor(f"{TABLE}.weight"), 4, 32, symmetric, scale_dtype=torch.bfloat16)
    assert (found.bits, found.group_size) == (4, 32)
    assert torch.equal(found.dequantize(), right.dequantize())
    layers = json.loads((ctx.out / "config.json").read_text())["quantization_config"]["layers"]
    assert layers[TABLE] == {"bits": 4, "group_size": 32, "columns": 128}
    assert layers["model.layers.0.self_attn.q_proj"]["group_size"] == 64
    assert layers["model.layers.0.mlp.down_proj"]["group_size"] == 128
    assert [written.has("lm_head.weight")] == [source.has("lm_head.weight")]


def test_engines_compute_with_it(model: Path, tmp_path: Path) -> None:
    quantised = run(tmp_path, model, format="deliver").out
    build(quantised, tmp_path / "engine", device="cpu", block_size=16, max_num_seqs=2)
    ids = [5, 9, 40, 41, 7, 3] * 6
    with LLM(quantised) as engine, LLM(tmp_path / "engine") as built, LLM(model) as source:
        ours, theirs = torch.cat(list(engine.logits(ids))), torch.cat(list(source.logits(ids)))
        assert torch.equal(ours, torch.cat(list(built.logits(ids))))
        config = load_config(Checkpoint.open(quantised).config)
        dense = load_ends(Checkpoint.open(quantised), config, dtype=torch.float32).table
        assert not torch.equal(dense, load_ends(Checkpoint.open(model), config, dtype=torch.float32).table)
        assert float((ours - theirs).norm() / theirs.norm()) < 0.4


def test_samples_are_embedded_with_it(model: Path) -> None:
    source = Checkpoint.open(model)
    config = load_config(source.config)
    plan = EmbeddingPlan(TABLE, 320, 128, 32)
    table = quantize_embedding(source, plan, Options())
    stream = start_stream(WithEmbedding(source, TABLE, table), config, [[3, 1, 4]], "cpu", torch.float32)
    ((_, hidden),) = stream.run()
    assert torch.equal(hidden, table.dequantize()[[3, 1, 4]])


@pytest.mark.parametrize("settings", [{}, {"format": "awq"}, {"format": "gptq"}, {"scheme": "awq-w4a16"}])
def test_other_formats_refuse_it(model: Path, settings: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a quantised embedding has no place in it[\s\S]*--format deliver"):
        run(tmp_path, model, **settings)


def test_it_stays_as_it_is_unless_asked_for(model: Path, tmp_path: Path) -> None:
    ctx = run(tmp_path, model, format="deliver", group_size="attention=64,mlp=128")
    kept = Checkpoint.open(ctx.out).tensor(f"{TABLE}.weight")
    assert torch.equal(kept, Checkpoint.open(model).tensor(f"{TABLE}.weight"))
