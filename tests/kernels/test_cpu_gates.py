"""Gated activations on a CPU, fused with their products, for gates of any size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from delivery.engine.cpu_record import Recorder
from delivery.kernels.cpu.layer import SMALL_ROWS, crew
from delivery.kernels.cpu.pack import pack

FEATURES = 40  # two whole vectors and a rest
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [8, SMALL_ROWS + 8])
def test_gates_far_from_zero(rows: int, activation: str) -> None:
    gates = torch.cat([torch.tensor([-1e4, -1000.0, -100.0, -89.0, -88.0, 1000.0]), torch.randn(rows - 6)])
    weight = torch.zeros(2 * FEATURES, 32)
    weight[:FEATURES, 0], weight[FEATURES:, 1] = 1.0, 2.0
    recorder = Recorder(rows)
    x = recorder.buffer(32, own=True)
    x.rows[:rows, 0], x.rows[:rows, 1] = gates, 1.0
    out = recorder.gated(recorder.linear(pack(weight), x), activation)
    crew().run(recorder.finish())
    want = 2 * ACTIVATIONS[activation](gates)
    torch.testing.assert_close(out.rows[:rows, :FEATURES], want[:, None].expand(-1, FEATURES))
