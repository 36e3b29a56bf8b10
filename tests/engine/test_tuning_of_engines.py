"""Choices measured at build: what is timed, and how a table travels with its engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from delivery.checkpoint import Checkpoint
from delivery.engine import LLM, build, builder
from delivery.engine.directory import TUNING, read_about, read_engine, read_tuning, write_engine
from delivery.engine.engine_model import load_model
from delivery.engine.forms_gpu import Dense, EightByEight, FourBit, GpuForms
from delivery.engine.layer_run import agrees, expected, run_layer, sample_activations
from delivery.engine.options import EngineOptions
from delivery.engine.tune import Subject, measured, narrowed, row_counts, subjects
from delivery.errors import DataError, EnvironmentLacking
from delivery.kernels import linear_w4a16, linear_w8a8, tuning
from delivery.kernels.linear_w4a16 import random_weight
from delivery.kernels.tuning import ROW_BUCKETS, Choice, Tile, TuningTable
from delivery.kernels.w8_layout import PackedW8
from delivery.model.load import load_config

TABLE = TuningTable().with_choice("linear_w4a16", 64, 128, 8, Choice("hopper", Tile(64, 8, 4, 6, 2)))


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    tuning.install(TuningTable())
    yield
    tuning.install(TuningTable())


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain")
    about = build(tiny_checkpoint, out, device="cpu", max_model_len=64, max_num_seqs=2, block_size=16)
    assert about["tuned"] == 0
    return out


def with_table(engine: Path, out: Path, table: TuningTable) -> Path:
    source = Checkpoint.open(engine)
    model = read_engine(engine, load_config(source.config), torch.device("cpu"))
    about = {k: v for k, v in read_about(engine).items() if k not in ("format", "format_version")}
    write_engine(out, source, model, about, table)
    return out


def test_a_table_is_stored_installed_and_replaced(engine: Path, tmp_path: Path) -> None:
    assert not (engine / TUNING).exists()
    assert read_tuning(engine) == TuningTable()
    tuned = with_table(engine, tmp_path / "tuned", TABLE)
    assert read_tuning(tuned) == TABLE
    with LLM(tuned):
        assert tuning.choice_for("linear_w4a16", 64, 128, 5) == TABLE.choices["linear_w4a16", 64, 128, 8]
    with LLM(engine):
        assert tuning.installed() == TuningTable()
        assert tuning.choice_for("linear_w4a16", 64, 128, 5) is None


def test_choices_measured_elsewhere_are_left_aside_or_refused(engine: Path, tmp_path: Path) -> None:
    tuned = with_table(engine, tmp_path / "tuned", TABLE)
    about = json.loads((tuned / "engine.json").read_text())
    about["build"]["torch"] = "1.0"
    (tuned / "engine.json").write_text(json.dumps(about))
    with LLM(tuned):
        assert tuning.installed() == TuningTable()
    with pytest.raises(EnvironmentLacking, match="was not built for this machine"):
        LLM(tuned, mismatch="refuse")


def test_a_damaged_table_is_bad_data(engine: Path, tmp_path: Path) -> None:
    tuned = with_table(engine, tmp_path / "tuned", TABLE)
    (tuned / TUNING).write_text("[{}]")
    with pytest.raises(DataError, match="cannot be read"):
        LLM(tuned)


def test_distinct_shapes_of_a_model(tiny_checkpoint: Path) -> None:
    source = Checkpoint.open(tiny_checkpoint)
    config = load_config(source.config)
    model = load_model(source, config, torch.device("cpu"), GpuForms(torch.float32))
    found = subjects(model)
    assert {s.op for s in found} == {"linear_w16a16"}
    assert (config.vocab_size, config.hidden_size) in {(s.n, s.k) for s in found}
    assert len({(s.n, s.k) for s in found}) == len(found) < 4 * config.num_layers + 1


def test_the_fastest_choice_of_every_shape_and_row_count_is_kept(tiny_checkpoint: Path) -> None:
    source = Checkpoint.open(tiny_checkpoint)
    model = load_model(source, load_config(source.config), torch.device("cpu"), GpuForms(torch.float32))
    timed: list[int] = []

    def time_us(calls: Sequence[Callable[[], object]]) -> float:
        timed.append(len(calls))
        return {"cublas": 1.0, "cpu": 2.0}[str(calls[0]())]

    def listed(_self: Subject, rows: int) -> list[Choice]:
        return [Choice("cublas"), Choice("cpu")] if rows == 1 else [Choice("cpu")]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Subject, "candidates", listed)
        patch.setattr("delivery.engine.tune.run_layer", lambda _layer, _x, choice: choice.backend)
        patch.setattr("delivery.engine.tune.agrees", lambda answer, _: answer in ("cublas", "cpu"))
        patch.setattr("delivery.kernels.gpu.timing.copies_for", lambda _: 3)
        table = measured(model, (1, 2048), time_us, sampled=4)
    expected = {("linear_w16a16", s.n, s.k, 8) for s in subjects(model)}
    expected |= {("linear_w16a16", s.n, s.k, 2048) for s in subjects(model) if not s.sampling}
    assert set(table.choices) == expected
    assert len([s for s in subjects(model) if s.sampling]) == 1
    assert {(key[3], choice.backend) for key, choice in table.choices.items()} == {
        (8, "cublas"),
        (2048, "cpu"),
    }
    assert set(timed) == {2, 3}


def test_a_backend_with_wrong_answers_is_never_chosen(tiny_checkpoint: Path) -> None:
    source = Checkpoint.open(tiny_checkpoint)
    model = load_model(source, load_config(source.config), torch.device("cpu"), GpuForms(torch.float32))
    said: list[str] = []

    def run_layer(layer: Dense, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        answer = x @ layer.weight.t()
        if choice.backend == "fast":  # one feature in sixteen is not added
            answer -= x[:, ::16] @ layer.weight[:, ::16].t()
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Subject, "candidates", lambda _self, _rows: [Choice("fast"), Choice("slow")])
        patch.setattr("delivery.engine.tune.run_layer", run_layer)
        patch.setattr("delivery.kernels.gpu.timing.copies_for", lambda _: 1)
        table = measured(model, (1, 64), lambda _: 1.0, 4, said.append)
    assert {choice.backend for choice in table.choices.values()} == {"slow"}
    assert "fast gives wrong answers and is left out: None" in said


@pytest.mark.parametrize("op", ["linear_w4a16", "linear_w8a8_int8", "linear_w16a16"])
def test_the_answer_that_a_build_expects_is_the_layers_own(op: str) -> None:
    layer = layer_of(op)
    if isinstance(layer, Dense):
        layer = Dense(torch.randn(256, 256), None)
    x = sample_activations(layer, 5, 256, torch.float32)
    wanted = expected(layer, x)
    assert agrees(run_layer(layer, x, Choice("cpu")), wanted)
    if wanted.any():
        assert not agrees(wanted * 1.03, wanted)
        assert not agrees(wanted.where(torch.arange(5)[:, None] != 3, torch.nan), wanted)


def layer_of(op: str) -> FourBit | EightByEight | Dense:
    if op == "linear_w4a16":
        weight = random_weight(256, 256, 128, zero_point=True, act_order=False, seed=0, scale=torch.float16)
        return FourBit(linear_w4a16.pack(weight), None)
    if op == "linear_w8a8_int8":
        weight8 = torch.zeros(256, 256, dtype=torch.int8)
        return EightByEight(PackedW8(weight8, torch.ones(256, 1)), None, torch.bfloat16)
    return Dense(torch.zeros(256, 256), None)


@pytest.mark.parametrize("op", ["linear_w4a16", "linear_w8a8_int8", "linear_w16a16"])
@pytest.mark.parametrize("rows", ROW_BUCKETS)
def test_candidates_keep_the_deepest_ring_of_each_shape(op: str, rows: int) -> None:
    candidates = Subject(op, 4096, 4096, layer_of(op)).candidates(rows)
    tiles = [replace(c.tile, stages=0, scale_weights=False) for c in candidates if c.tile is not None]
    assert len(set(tiles)) == len(tiles)
    assert 0 < len(candidates) < 40


def test_deeper_rings_and_scaled_sums_win() -> None:
    wanted = Choice("hopper", Tile(stages=6))
    others = [Choice("hopper", Tile(stages=4)), Choice("hopper", Tile(stages=8, scale_weights=True))]
    assert narrowed([others[0], wanted, others[1]]) == [wanted]
    assert narrowed([others[1], wanted, Choice("expand")]) == [wanted, Choice("expand")]


@pytest.mark.parametrize(("tokens", "last"), [(1, 1), (96, 128), (8192, 8192), (20000, 8192)])
def test_row_counts_reach_the_largest_step(tokens: int, last: int) -> None:
    counts = row_counts(tokens)
    assert counts[0] == 1
    assert counts[-1] == last
    assert list(counts) == sorted(set(counts))


def test_names_of_eight_bit_tables() -> None:
    for dtype, name in ((torch.int8, "linear_w8a8_int8"), (torch.float8_e4m3fn, "linear_w8a8_fp8")):
        assert linear_w8a8.table_name(PackedW8(torch.zeros(2, 2).to(dtype), torch.ones(2, 1))) == name


def test_a_build_for_a_cpu_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(builder, "_prepared", lambda *_: pytest.fail("measured on a CPU"))
    build(tiny_checkpoint, tmp_path, device="cpu", max_model_len=64, max_num_seqs=2, block_size=16)
    assert read_about(tmp_path)["tuned"] == 0


def test_a_build_for_a_gpu_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, engine: Path) -> None:
    source = Checkpoint.open(engine)
    model = read_engine(engine, load_config(source.config), torch.device("cpu"))
    asked: list[tuple[tuple[int, ...], int]] = []
    seen: list[TuningTable] = []

    def fake(_model: object, rows: tuple[int, ...], _time: object, sampled: int, note: Any) -> TuningTable:
        asked.append((rows, sampled))
        note("measuring")
        return TABLE

    monkeypatch.setattr(builder.measuring, "measured", fake)
    monkeypatch.setattr(builder, "around", lambda *_: seen.append(tuning.installed()))
    options = EngineOptions(max_num_seqs=7, max_num_batched_tokens=300)
    notes: list[str] = []
    assert builder._prepared(model, options, "cuda", notes.append) == TABLE
    assert notes == ["measuring", "recording steps"]
    assert asked == [((1, 16, 32, 64, 128, 256, 512), 7)]
    assert seen == [TABLE]  # recorded, and so compiled, with the choices that will serve
    assert tuning.installed() == TuningTable()
