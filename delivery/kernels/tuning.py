"""Which backend and tile a linear layer takes, by operator, shape and number of rows.

`deliver build` measures the candidates on the card and stores the table with the engine; without a table
each backend falls back on its own rule. Plain data and arithmetic: no kernel is imported here.
`tuned/<device>.json` are tables measured by benchmarks/gpu.py, used where nothing else was installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files

from delivery.errors import DataError

ROW_BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SHARED_BYTES = 227 << 10
"""Shared memory that one block of a Hopper card may use; a multiprocessor has 1 KiB more."""
REGISTERS = 65536


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one program of a Hopper kernel.

    block_n: output features; block_m: rows of x; warps: consumers, 4 or 8 (a producer comes on top);
    stages: depth of the ring; splits: programs that share K; scale_weights: 4-bit only, scales act on the
    weights instead of the accumulator; group_m: row tiles that share a column tile's weights in L2.
    """

    block_n: int = 64
    block_m: int = 8
    warps: int = 4
    stages: int = 6
    splits: int = 1
    scale_weights: bool = False
    group_m: int = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, and its tile where it has one."""

    backend: str
    tile: Tile | None = None


Key = tuple[str, int, int, int]
_NEAR = 1.25
_DECODED_ROWS = 256
_SCALED_MM_BURDEN = 1.1


@dataclass(frozen=True)
class TuningTable:
    """(operator, N, K, row bucket) → Choice."""

    choices: Mapping[Key, Choice] = field(default_factory=dict)

    def lookup(self, op: str, n: int, k: int, rows: int) -> Choice | None:
        """What was measured best for a weight [n, k] and `rows` rows, None if nothing was.

        A row count that was not measured takes the choice of the next larger one, or of the largest.
        """
        if not self.choices:
            return None
        wanted = bucket(rows)
        if exact := self.choices.get((op, n, k, wanted)):
            return exact
        measured = [b for b in ROW_BUCKETS if (op, n, k, b) in self.choices]
        larger = [b for b in measured if b > wanted]
        return self.choices[(op, n, k, (larger or measured[-1:])[0])] if measured else None

    def with_choice(self, op: str, n: int, k: int, rows: int, choice: Choice) -> TuningTable:
        """A table that also holds `choice`."""
        return replace(self, choices={**self.choices, (op, n, k, bucket(rows)): choice})

    def to_json(self) -> str:
        """Rows in a stable order, one a line."""
        rows = [
            {"op": op, "n": n, "k": k, "rows": m, **_plain(choice)}
            for (op, n, k, m), choice in sorted(self.choices.items())
        ]
        return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]"

    @classmethod
    def from_json(cls, text: str) -> TuningTable:
        """The inverse of `to_json`. Raises DataError `tuning-table-damaged`."""
        try:
            rows = json.loads(text)
            return cls({(r["op"], r["n"], r["k"], r["rows"]): _choice(r) for r in rows})
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                "tuning-table-damaged",
                "the table of kernel choices cannot be read",
                why=f"{type(error).__name__}: {error}",
                hint="deliver build",
            ) from error


def bucket(rows: int) -> int:
    """The smallest row bucket that holds `rows`; the largest one for more."""
    return next((b for b in ROW_BUCKETS if rows <= b), ROW_BUCKETS[-1])


_installed = [TuningTable()]


def install(table: TuningTable) -> None:
    """Make `table` the one that operators ask (an engine does this when it loads)."""
    _installed[0] = table
    _looked_up.cache_clear()


def installed() -> TuningTable:
    """The table that operators ask first."""
    return _installed[0]


def choice_for(op: str, n: int, k: int, rows: int) -> Choice | None:
    """The installed table's choice, else that of the table shipped for this card."""
    return _looked_up(op, n, k, bucket(rows))


@cache
def _looked_up(op: str, n: int, k: int, rows: int) -> Choice | None:
    return _installed[0].lookup(op, n, k, rows) or shipped(_card()).lookup(op, n, k, rows)


@cache
def shipped(card: str) -> TuningTable:
    """The table that comes with the package for a card's name; empty for other cards."""
    slug = "-".join(card.lower().split())
    entry = files("delivery.kernels") / "tuned" / f"{slug}.json"
    return TuningTable.from_json(entry.read_text("utf-8")) if slug and entry.is_file() else TuningTable()


@cache
def _card() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def measure(
    candidates: Iterable[Choice],
    run: Callable[[Choice], object],
    time_us: Callable[[Callable[[], object]], float],
    right: Callable[[Choice], bool] = lambda _: True,
    rows: int = 0,
) -> tuple[Choice, float]:
    """The fastest right candidate and its time in µs. `run` executes one, `time_us` times a call, `right`
    says whether its answer is that of the reference: a compiler, a driver or a card that nobody has seen may
    make a wrong kernel of a right program.

    Those within a quarter of the fastest are timed again in opposite order, and the mean counts: under long
    products a card reaches its power limit and slows down, which would favour whoever came first. What a
    choice costs its neighbours counts too (`burden` for that many `rows`; 0: not known, nothing is added).
    A candidate that cannot be launched (RuntimeError: out of shared memory or registers) is left out.
    Raises DataError `nothing-to-measure` when none can, or none is right.
    """
    listed = [candidate for candidate in candidates if _launched_right(candidate, right)]
    first = {i: taken for i, c in enumerate(listed) if (taken := _taken(c, run, time_us)) is not None}
    means: dict[int, float] = {}
    near = min(first.values(), default=0.0) * _NEAR
    for i in reversed([i for i, taken in first.items() if taken <= near]):
        again = _taken(listed[i], run, time_us)
        if again is not None:
            means[i] = (first[i] + again) / 2
    if not means:
        raise DataError(
            "nothing-to-measure",
            "no candidate could be launched and gave the reference's answer",
            hint="deliver doctor",
        )
    best = min(means, key=lambda i: means[i] * burden(listed[i], rows))
    return listed[best], means[best]


def burden(choice: Choice, rows: int) -> float:
    """What a choice costs in a step beyond its time alone, as a factor of that time.

    `torch._scaled_mm` clears memory in front of itself, lets nothing start beside it, and slows the attention
    of decode steps. fp8 at 256 rows, where it is level with our kernel by itself: 487 µs a layer of an 8B
    model with it on an H200, 422 without (docs/performance/engine.md). cuBLAS in 16 bits costs nothing more.
    """
    return _SCALED_MM_BURDEN if choice.backend == "scaled_mm" and 0 < rows <= _DECODED_ROWS else 1.0


def _launched_right(candidate: Choice, right: Callable[[Choice], bool]) -> bool:
    try:
        return right(candidate)
    except RuntimeError:
        return False


def _taken(
    candidate: Choice, run: Callable[[Choice], object], time_us: Callable[[Callable[[], object]], float]
) -> float | None:
    try:
        return time_us(lambda: run(candidate))
    except RuntimeError:
        return None


def programs_per_multiprocessor(tile: Tile, shared_bytes: int) -> int:
    """How many programs of `shared_bytes` run at once on one Hopper multiprocessor.

    Sixteen consumer warps are the most that leave each enough registers to keep its products in flight.
    """
    return max(1, min(16 // tile.warps, (SHARED_BYTES + 1024) // (shared_bytes + 2048)))


def fitting(tile: Tile, stage_bytes: int) -> Tile:
    """The tile with no more stages of `stage_bytes` than shared memory holds, room for writing left."""
    return replace(tile, stages=max(1, min(tile.stages, (SHARED_BYTES - 6144) // stage_bytes)))


def registers_per_thread(tile: Tile, shared_bytes: int) -> int:
    """Registers to ask for at launch, so that as many programs fit as shared memory allows.

    A program has `tile.warps` consumers and one producer, rounded up to whole warpgroups; the producer's
    share is given to the consumers when the program starts.
    """
    threads = (tile.warps + 4) * 32
    return min(168, REGISTERS // (programs_per_multiprocessor(tile, shared_bytes) * threads) // 8 * 8)


def even_splits(steps: int, splits: int) -> tuple[int, int]:
    """(splits, steps of each) with no split empty, for at most `splits`."""
    each = -(-steps // max(1, min(splits, steps)))
    return -(-steps // each), each


def _plain(choice: Choice) -> dict[str, object]:
    return {"backend": choice.backend, "tile": None if choice.tile is None else asdict(choice.tile)}


def _choice(row: Mapping[str, object]) -> Choice:
    tile = row["tile"]
    if tile is not None and not isinstance(tile, dict):
        raise TypeError(f"tile is a {type(tile).__name__}")
    return Choice(str(row["backend"]), None if tile is None else Tile(**tile))
