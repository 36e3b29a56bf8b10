"""Tasks of the processes that compile: what travels, and that each kernel is compiled once."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch

from delivery.engine import compile_ahead
from delivery.engine.compile_ahead import described, distinct, main
from delivery.engine.forms_gpu import Dense, EightByEight, FourBit
from delivery.kernels import linear_w4a16
from delivery.kernels.linear_w4a16 import random_weight
from delivery.kernels.tuning import Choice, Tile
from delivery.kernels.w8_layout import PackedW8

PACKED = PackedW8(torch.zeros(32, 64, dtype=torch.int8), torch.ones(32, 1))
WEIGHT = random_weight(256, 256, 128, zero_point=True, act_order=False, seed=0, scale=torch.float16)
LAYERS = [
    (Dense(torch.zeros(32, 64), None), 32, 64),
    (EightByEight(PACKED, None, torch.float32), 32, 64),
    (FourBit(linear_w4a16.pack(WEIGHT), torch.zeros(256)), 256, 256),
]


@pytest.mark.parametrize(("layer", "n", "k"), LAYERS)
def test_a_described_layer_runs(layer: object, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run_layer(made: object, x: object, choice: Choice) -> None:
        rows = x[0] if isinstance(x, tuple) else x
        ran.append((type(made), tuple(rows.shape), choice))

    monkeypatch.setattr("delivery.engine.compile_ahead.run_layer", run_layer)
    task = json.dumps(described((layer, 5, n, k, Choice("hopper", Tile(splits=3))), torch.float32))
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{task}\n{task}"))
    main("cpu")
    assert ran == [(type(layer), (5, k), Choice("hopper", Tile(splits=3)))] * 2


def test_what_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, n, k = LAYERS[0]
    tasks = [
        json.dumps(described((layer, 5, n, k, Choice(name)), torch.float32)) for name in ("hopper", "cpu")
    ]
    ran = []

    def run_layer(layer: Any, x: Any, choice: Choice) -> None:
        runs(layer, x, choice)
        ran.append(choice.backend)

    runs = compile_ahead.run_layer
    monkeypatch.setattr(compile_ahead, "run_layer", run_layer)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(tasks)))
    main("cpu")
    assert ran == ["cpu"]


def test_each_kernel_once() -> None:
    layer, n, k = LAYERS[1]
    tiles = [Tile(splits=1), Tile(splits=2), Tile(splits=4), Tile(block_m=16), Tile()]
    tasks = [(layer, 5, n, k, Choice("hopper", tile)) for tile in tiles]
    tasks += [(LAYERS[2][0], 5, n, k, Choice("hopper", Tile())), (layer, 5, n, k, Choice("cublas"))]
    assert len(distinct(tasks, torch.bfloat16)) == 4


def test_few_kernels_take_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead.subprocess, "Popen", None)
    layer, n, k = LAYERS[1]
    assert compile_ahead.compile_ahead([(layer, 5, n, k, Choice("hopper", Tile()))], torch.bfloat16) == 0
