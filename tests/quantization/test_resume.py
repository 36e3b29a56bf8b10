"""How often half-done work is kept: as often as it costs next to nothing, and never less than every 20 s."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from delivery.quantization import resume
from delivery.quantization.resume import LayerStore


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Hidden:
    """Stands for a Stream of a given size that takes its time to write."""

    def __init__(self, clock: Clock, size_bytes: int, writing_s: float) -> None:
        self.clock, self.size_bytes, self.writing_s = clock, size_bytes, writing_s
        self.restored: Path | None = None

    def save(self, path: Path) -> None:
        self.clock.now += self.writing_s
        path.write_bytes(b"hidden")

    def restore(self, path: Path) -> None:
        self.restored = path


@pytest.mark.parametrize(
    ("size_bytes", "writing_s", "layer_s", "saved"),
    [
        (1_000_000, 0.001, 0.1, [0, 1, 2, 3]),  # a toy: every layer
        (100_000_000, 0.1, 1.0, [3]),  # 0.2 s expected: after 4 s of work
        (4_000_000_000, 8.0, 9.0, [2]),  # gigabytes: every 20 s, however long it takes
    ],
)
def test_layers_are_kept_as_often_as_it_is_cheap(
    size_bytes: int,
    writing_s: float,
    layer_s: float,
    saved: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(resume, "time", clock)
    stream: Any = Hidden(clock, size_bytes, writing_s)
    store = LayerStore(tmp_path, {"a": 1})
    kept = []
    for layer in range(4):
        clock.now += layer_s
        before = LayerStore(tmp_path, {"a": 1}).resume(stream)
        store.put(layer, {"w": torch.zeros(1)}, {}, stream)
        if LayerStore(tmp_path, {"a": 1}).resume(stream) != before:
            kept.append(layer)
            assert stream.restored.name == f"hidden-{layer + 1:05d}.safetensors"
    assert kept == saved
    assert len(list((tmp_path / "layers").glob("hidden-*"))) == 1


def test_what_a_writing_cost_decides_about_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(resume, "time", clock)
    stream: Any = Hidden(clock, 1_000_000, 0.5)  # a slow disk: half a second for a megabyte
    store = LayerStore(tmp_path, {})
    found = []
    for layer in range(24):
        clock.now += 1.0
        store.put(layer, {"w": torch.zeros(1)}, {}, stream)
        found.append(LayerStore(tmp_path, {}).resume(stream))
    assert sorted(set(found)) == [1, 11, 21]
