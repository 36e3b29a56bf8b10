"""Tuning by `deliver build`: the fastest backend and tile of every linear layer, by number of rows.

Each shape of the model is timed once for each kind of weight, on copies of one of its own layers that
together do not fit the cache. The table goes into the engine directory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from delivery.engine.compile_ahead import Task, compile_ahead
from delivery.engine.engine_model import EngineModel
from delivery.engine.forms_gpu import Dense, EightByEight, FourBit
from delivery.engine.layer_run import Layer, agrees, expected, run_layer, sample_activations, tensors_of
from delivery.errors import EnvironmentLacking
from delivery.kernels import linear_w4a16, linear_w8a8, linear_w16a16
from delivery.kernels.tuning import ROW_BUCKETS, Choice, TuningTable, bucket, measure

_MOST_COPIES = 16
_FEW_ROWS = 256


@dataclass(frozen=True, slots=True)
class Subject:
    """A shape to be measured: the operator's name in the table, the weight [n, k], a layer that has it.

    sampling: the head's alone, which sees only the rows that sample.
    """

    op: str
    n: int
    k: int
    layer: Layer
    sampling: bool = False

    def rows(self, rows: Sequence[int], sampled: int) -> list[int]:
        """Of the row counts those that this layer may see, when at most `sampled` rows sample."""
        return [count for count in rows if not self.sampling or count <= bucket(sampled)]

    def candidates(self, rows: int) -> list[Choice]:
        """Candidate backends and tiles; of tiles that differ only in depth, the deepest ring."""
        if isinstance(self.layer, FourBit):
            return narrowed(linear_w4a16.candidates(self.n, self.k, rows))
        if isinstance(self.layer, EightByEight):
            dtype = self.layer.packed.weight.dtype
            return narrowed(linear_w8a8.candidates(self.n, self.k, rows, dtype))
        return narrowed(linear_w16a16.candidates(self.n, self.k, rows))


def subjects(model: EngineModel) -> list[Subject]:
    """The distinct shapes of a model's layers that have a choice."""
    found: dict[tuple[str, int, int], Subject] = {}
    for run, sampling in (*((run, False) for run in _runs(model)), (model.head.head, True)):
        if isinstance(run, FourBit):
            name, (n, k) = "linear_w4a16", run.packed.shape
        elif isinstance(run, EightByEight):
            name, (n, k) = linear_w8a8.table_name(run.packed), run.packed.shape
        elif isinstance(run, Dense):
            name, (n, k) = "linear_w16a16", run.weight.shape
        else:
            continue
        found.setdefault((name, n, k), Subject(name, n, k, run, sampling))
    return list(found.values())


def row_counts(tokens: int) -> tuple[int, ...]:
    """Rows to measure for steps of at most `tokens` tokens: one, and the most of each larger bucket."""
    largest = bucket(tokens)
    return (1, *(rows for rows in ROW_BUCKETS[1:] if rows <= largest))


def narrowed(candidates: Iterable[Choice]) -> list[Choice]:
    """The candidates without those that another one replaces: a ring of less depth, and, for weights in 4
    bits, scales on the weights where scales on the sums are possible."""
    kept: dict[Any, Choice] = {}
    for choice in candidates:
        tile = choice.tile
        if tile is None:
            kept[choice.backend] = choice
            continue
        shape = (choice.backend, tile.block_n, tile.block_m, tile.warps, tile.splits, tile.group_m)
        before = kept.get(shape)
        if before is None or before.tile is None or _rank(choice) > _rank(before):
            kept[shape] = choice
    return list(kept.values())


def _rank(choice: Choice) -> tuple[bool, int]:
    return (False, 0) if choice.tile is None else (not choice.tile.scale_weights, choice.tile.stages)


def measured(
    model: EngineModel,
    rows: Sequence[int],
    time_us: Callable[[Sequence[Callable[[], object]]], float],
    sampled: int,
    progress: Callable[[str], None] = lambda _: None,
) -> TuningTable:
    """The table of a model's layers on this card.

    time_us: the time of one call when the given ones run in turn (`delivery.kernels.gpu.timing`). sampled:
    the most rows that sample in a step. progress gets a line about each measurement.
    """
    table = TuningTable()
    if torch.cuda.is_available():
        progress("compiling candidates")
        compile_ahead(_tasks(model, rows, sampled), model.dtype)
    for subject in subjects(model):
        progress(f"measuring {subject.op} {subject.n} x {subject.k}")
        layers = [subject.layer, *_copies(subject.layer)]
        for count in subject.rows(rows, sampled):
            x = sample_activations(subject.layer, count, subject.k, model.dtype)
            # With many rows the weights are read once for much arithmetic: cold or not hardly matters.
            cold = layers if count <= _FEW_ROWS else layers[:2]

            def run(choice: Choice, layers: list[Layer] = cold, x: Any = x) -> list[Callable[[], object]]:
                return [lambda layer=layer: run_layer(layer, x, choice) for layer in layers]  # type: ignore[misc]

            def timed(call: Callable[[], object]) -> float:
                calls: Any = call()
                try:
                    return time_us(calls)
                except EnvironmentLacking as error:
                    raise RuntimeError(str(error)) from error  # a backend that cannot take this call

            wanted = expected(subject.layer, x)

            def right(choice: Choice, layer: Layer = subject.layer, x: Any = x, wanted: Any = wanted) -> bool:
                try:
                    run_layer(layer, x, choice)  # what one launch leaves behind must not spoil the next
                    good = agrees(run_layer(layer, x, choice), wanted)
                except EnvironmentLacking:
                    return False
                if not good:
                    progress(f"{choice.backend} gives wrong answers and is left out: {choice.tile}")
                return good

            best, _ = measure(subject.candidates(count), run, timed, right, count)
            table = table.with_choice(subject.op, subject.n, subject.k, count, best)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the timed graphs kept
    return table


def _tasks(model: EngineModel, rows: Sequence[int], sampled: int) -> Iterator[Task]:
    for subject in subjects(model):
        for count in subject.rows(rows, sampled):
            for choice in subject.candidates(count):
                yield subject.layer, count, subject.n, subject.k, choice


def _copies(layer: Layer) -> list[Layer]:
    from delivery.kernels.gpu.timing import copies_for

    size = sum(t.numel() * t.element_size() for t in tensors_of(layer))
    return [_copied(layer) for _ in range(min(_MOST_COPIES, copies_for(size)) - 1)]


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _copied(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


def _runs(model: EngineModel) -> Iterator[object]:
    for block in model.blocks:
        yield from block.linears.values()
        for product in block.products.values():
            yield product.run
