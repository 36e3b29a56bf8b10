"""Tuning tables: lookups, files, measuring; and the arithmetic of tiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from delivery.errors import DataError
from delivery.kernels import hopper_rules, linear_w4a16, linear_w8a8, tuning
from delivery.kernels.tuning import Choice, Tile, TuningTable


def test_a_row_count_takes_its_bucket_then_the_next_larger_then_the_largest() -> None:
    table = TuningTable()
    for rows in (1, 64, 2048):
        table = table.with_choice("op", 128, 256, rows, Choice(f"for-{rows}"))

    def backend(rows: int) -> str:
        choice = table.lookup("op", 128, 256, rows)
        assert choice is not None
        return choice.backend

    assert [backend(m) for m in (1, 8, 9, 64, 65, 2048, 9999)] == [
        "for-1",
        "for-1",
        "for-64",
        "for-64",
        "for-2048",
        "for-2048",
        "for-2048",
    ]
    assert table.lookup("op", 128, 512, 1) is None
    assert TuningTable().lookup("op", 1, 1, 1) is None


def test_a_table_survives_its_file() -> None:
    table = TuningTable().with_choice("a", 1, 2, 3, Choice("hopper", Tile(64, 8, 4, 6, 3, True, 4)))
    table = table.with_choice("b", 4, 5, 600, Choice("cublas"))
    assert TuningTable.from_json(table.to_json()) == table


@pytest.mark.parametrize(
    "text", ["{", "[{}]", '[{"op":1,"n":1,"k":1,"rows":1,"backend":"x","tile":{"no":1}}]']
)
def test_a_damaged_table_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        TuningTable.from_json(text)


def test_the_fastest_candidate_that_can_be_launched_wins() -> None:
    def run(choice: Choice) -> None:
        if choice.backend == "broken":
            raise RuntimeError("out of shared memory")

    times = {"slow": 3.0, "fast": 1.0}
    ran: list[str] = []

    def time_us(call: object) -> float:
        assert callable(call)
        call()
        return times[ran.pop()] if ran else 2.0

    def run_and_note(choice: Choice) -> None:
        run(choice)
        ran.append(choice.backend)

    names = ("slow", "broken", "fast")
    assert tuning.measure([Choice(n) for n in names], run_and_note, time_us) == (Choice("fast"), 1.0)
    with pytest.raises(DataError, match="no candidate could be launched and gave"):
        tuning.measure([Choice("broken")], run, time_us)


def test_a_wrong_candidate_is_not_even_timed() -> None:
    timed: list[str] = []

    def time_us(call: Callable[[], object]) -> float:
        timed.append(str(call()))
        return {"wrong": 1.0, "right": 2.0}[timed[-1]]

    def right(choice: Choice) -> bool:
        if choice.backend == "broken":
            raise RuntimeError("out of shared memory")
        return choice.backend == "right"

    names = [Choice("wrong"), Choice("broken"), Choice("right")]
    assert tuning.measure(names, lambda c: c.backend, time_us, right) == (Choice("right"), 2.0)
    assert set(timed) == {"right"}
    with pytest.raises(DataError, match="gave the reference's answer"):
        tuning.measure(names[:2], lambda c: c.backend, time_us, right)


def test_a_card_that_slows_down_does_not_favour_whoever_comes_first() -> None:
    calls: list[int] = []
    cost = {"early": 10.0, "middle": 11.0, "late": 9.0, "far": 40.0}

    def time_us(call: object) -> float:
        assert callable(call)
        name = call()
        calls.append(1)
        return cost[name] * (1 + 0.1 * len(calls))

    choice, _ = tuning.measure([Choice(name) for name in cost], lambda c: c.backend, time_us)
    assert choice == Choice("late")
    assert len(calls) == 2 * len(cost) - 1  # who is far behind is not timed again


@pytest.mark.parametrize(
    ("alone_us", "rows", "chosen"),
    [(0.95, 256, "hopper"), (0.85, 256, "scaled_mm"), (0.95, 512, "scaled_mm")],
)
def test_what_a_product_costs_its_neighbours_counts(alone_us: float, rows: int, chosen: str) -> None:
    times = {"hopper": 1.0, "scaled_mm": alone_us}

    def time_us(call: Callable[[], object]) -> float:
        return times[str(call())]

    names = [Choice("hopper"), Choice("scaled_mm")]
    best, taken_us = tuning.measure(names, lambda c: c.backend, time_us, rows=rows)
    assert (best.backend, taken_us) == (chosen, times[chosen])


def test_the_shipped_table_knows_the_8b_shapes_of_its_card() -> None:
    table = tuning.shipped("NVIDIA H200")
    for op in ("linear_w4a16", "linear_w8a8_int8", "linear_w8a8_fp8", "linear_w16a16"):
        for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
            assert table.lookup(op, n, k, 1) is not None
    assert tuning.shipped("Some Other Card") == TuningTable()
    assert tuning.shipped("") == TuningTable()


def test_an_installed_table_comes_first() -> None:
    mine = TuningTable().with_choice("linear_w16a16", 7, 9, 1, Choice("cublas"))
    tuning.install(mine)
    try:
        assert tuning.choice_for("linear_w16a16", 7, 9, 1) == Choice("cublas")
    finally:
        tuning.install(TuningTable())
    assert tuning.choice_for("linear_w16a16", 7, 9, 1) is None


@pytest.mark.parametrize(("steps", "splits"), [(32, 5), (1, 8), (7, 3), (112, 8), (10, 4)])
def test_splits_leave_none_empty(steps: int, splits: int) -> None:
    count, each = tuning.even_splits(steps, splits)
    assert count <= splits
    assert (count - 1) * each < steps <= count * each


def test_every_candidate_fits_the_card() -> None:
    for rows in (1, 16, 32, 64, 128, 256, 2048):
        tiles = [c.tile for c in linear_w4a16.candidates(28672, 4096, rows)]
        tiles += [c.tile for c in linear_w8a8.candidates(4096, 14336, rows, torch.int8)]
        assert tiles
        for tile in tiles:
            if tile is not None:
                shared = tile.stages * (tile.block_n + tile.block_m) * 128
                assert tile.splits <= 8
                threads = (tile.warps + 4) * 32 * tuning.programs_per_multiprocessor(tile, shared)
                assert threads * tuning.registers_per_thread(tile, shared) <= tuning.REGISTERS


@pytest.mark.parametrize("four_bit", [True, False])
@pytest.mark.parametrize("rows", [1, 9, 20, 33, 100, 500, 5000])
def test_the_rule_covers_the_rows(four_bit: bool, rows: int) -> None:
    for n in (71, 4096, 28672):
        tile = hopper_rules.rule(n, 32, rows, torch.device("cpu"), four_bit=four_bit)
        assert tile.block_m >= min(rows, 128)
        assert 1 <= tile.splits <= 8


def test_fewer_stages_are_taken_where_memory_ends() -> None:
    assert tuning.fitting(Tile(stages=8), 100_000).stages == 2
    assert tuning.fitting(Tile(stages=3), 1000).stages == 3
    assert tuning.fitting(Tile(stages=3), 10_000_000).stages == 1
