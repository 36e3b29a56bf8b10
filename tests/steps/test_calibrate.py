"""The calibrate step: what it writes, says, refuses, and how it goes on after a kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quantize_fixtures import WORDS, context, write_checkpoint
from safetensors.torch import load_file

from delivery.checkpoint import Checkpoint
from delivery.errors import DataError, UsageError
from delivery.model import DenseAttention, block, embed, load_block, load_config, load_ends
from delivery.quantization import resume, walk
from delivery.quantization.calibration import read_calibration, read_statistics
from delivery.steps.calibrate import Calibrate
from delivery.steps.step import Ahead


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": f"{i}: {WORDS}" * 4}) for i in range(60)]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    return tmp_path / "own.jsonl"


def step(corpus: Path, **changes: Any) -> Calibrate:
    settings = {"samples": 6, "sequence_length": 32, **changes}
    return Calibrate(checkpoint="m", corpus=str(corpus), **settings)


def test_the_artifact_holds_tokens_samples_statistics_and_a_report(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    ctx = context(tmp_path, "cal", checkpoint=model)
    step(corpus).run(ctx)
    calibration = read_calibration(ctx.out)
    assert len(calibration.samples) == 6
    assert calibration.tokens == 192 == ctx.metrics["calibration_tokens"]
    assert all(s[0] == 0 for s in calibration.samples)  # BOS, as at serving time
    rows = [json.loads(line) for line in (ctx.out / "samples.jsonl").read_text().splitlines()]
    assert {r["corpus"] for r in rows} == {"own.jsonl"}
    assert "permission is granted" in rows[0]["text"] + rows[1]["text"]
    assert calibration.report["corpora"]["own.jsonl"]["token_share"] == 1.0
    assert calibration.report["scripts"]["Latin"] == 1.0
    for layer in range(3):
        found = read_statistics(ctx.out, layer)
        assert set(found) == {
            f"{key}.{kind}"
            for key in ("q_proj", "o_proj", "gate_proj", "down_proj")
            for kind in ("absmax", "mean_abs", "l2", "range_999")
        }
    assert found["down_proj.l2"].shape == (384,)
    said = ctx.texts("info")
    for part in ("predicted peak memory", "Latin 100%", "1024 or more of your own", "sample (own.jsonl)"):
        assert part in said
    assert any("layer 3 of 3, peak" in note for note in ctx.notes)


def test_statistics_are_those_of_the_float_model(model: Path, corpus: Path, tmp_path: Path) -> None:
    ctx = context(tmp_path, "cal", checkpoint=model)
    step(corpus, samples=2).run(ctx)
    ids = torch.tensor(read_calibration(ctx.out).samples[0])
    other = torch.tensor(read_calibration(ctx.out).samples[1])
    checkpoint = Checkpoint.open(model)
    config = load_config(checkpoint.config)
    hidden = embed(config, load_ends(checkpoint, config, dtype=torch.float32).table, torch.cat([ids, other]))
    mixer, positions = DenseAttention([32, 32]), torch.arange(32).repeat(2)
    for layer in range(3):
        weights = load_block(checkpoint, config, layer, dtype=torch.float32)
        seen = weights.norms["input_norm"](hidden)
        found = read_statistics(ctx.out, layer)
        assert torch.allclose(found["q_proj.absmax"], seen.abs().amax(0), rtol=1e-4)
        assert torch.allclose(found["q_proj.l2"], seen.square().mean(0).sqrt(), rtol=1e-4)
        hidden = block(config, layer, weights, hidden, positions, mixer)


def test_a_killed_run_goes_on_and_gives_the_same(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = context(tmp_path, "whole", checkpoint=model)
    step(corpus).run(whole)
    monkeypatch.setattr(resume, "_SAVE_EVERY_S", 0.0)
    killed = context(tmp_path, "killed", checkpoint=model)
    done: list[int] = []
    observe = walk.observe_layer

    def dying(source: Any, config: Any, layer: int, *rest: Any) -> Any:
        if layer == 2 and len(done) == 2:
            raise KeyboardInterrupt
        done.append(layer)
        return observe(source, config, layer, *rest)

    monkeypatch.setattr(walk, "observe_layer", dying)
    with pytest.raises(KeyboardInterrupt):
        step(corpus).run(killed)
    again = context(tmp_path, "again", checkpoint=model)
    again.scratch = killed.scratch
    done.append(-1)
    step(corpus).run(again)
    assert done == [0, 1, -1, 2]
    assert "resuming after layer 2" in again.notes
    for name in ("tokens.safetensors", "statistics.safetensors", "samples.jsonl", "calibration.json"):
        assert (again.out / name).read_bytes() == (whole.out / name).read_bytes(), name


def test_what_belongs_to_another_run_is_not_taken_up(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "_SAVE_EVERY_S", 0.0)
    first = context(tmp_path, "first", checkpoint=model)
    step(corpus).run(first)
    other = context(tmp_path, "other", checkpoint=model)
    other.scratch = first.scratch
    step(corpus, samples=5).run(other)
    assert not any("resuming" in note for note in other.notes)
    assert load_file(other.out / "tokens.safetensors")["lengths"].tolist() == [32] * 5


def test_a_mix_is_digested_by_what_is_read(corpus: Path) -> None:
    before = step(corpus).external()
    assert list(before) == [corpus.name]
    corpus.write_text(corpus.read_text() + json.dumps({"text": "more"}))
    assert step(corpus).external() != before


def test_bad_sizes_and_texts_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--samples is 0\n  why:  expected at least 1"):
        step(tmp_path, samples=0).run(context(tmp_path, "a", checkpoint=model))
    (tmp_path / "short.txt").write_text("one word")
    with pytest.raises(DataError, match=r"the corpora give \d+ tokens\n  why:  expected at least 64"):
        step(tmp_path / "short.txt").run(context(tmp_path, "b", checkpoint=model))


def test_the_peak_is_predicted_from_the_config(model: Path) -> None:
    small = step(Path("legal"))
    large = step(Path("legal"), samples=8000, sequence_length=256)
    assert small.predict_peak({}) is None
    few, many = (s.predict_peak({"checkpoint": [Ahead("convert", {}, model)]}) for s in (small, large))
    assert few is not None
    assert many is not None
    assert many.host_bytes > few.host_bytes + 8000 * 256 * 128 * 4 * 0.9


def test_samples_are_no_longer_than_the_model_was_made_for(model: Path, corpus: Path, tmp_path: Path) -> None:
    short = shutil.copytree(model, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 20}))
    ctx = context(tmp_path, "cal", checkpoint=short)
    step(corpus).run(ctx)
    assert max(map(len, read_calibration(ctx.out).samples)) == 20
    assert "limited to 20 tokens" in ctx.texts("info")
