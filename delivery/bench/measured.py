"""Measured: the runs of one comparison, written next to a report and read back when it is judged."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.artifact import canonical_json
from delivery.bench.disturbance import Disturbance
from delivery.gate.baseline import Snapshot
from delivery.gate.imports import read_results
from delivery.gate.record import RequestRecord, read_records, write_records

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Runs = tuple[tuple[RequestRecord, ...], ...]
_FOLDER = "runs"


@dataclass(frozen=True, slots=True)
class Side:
    """The runs of one engine or server, in order, with what disturbed each."""

    runs: Runs
    disturbances: tuple[Disturbance, ...]
    memory: Mapping[str, float] | None
    runtime: str
    load_s: float | None
    capacity: float | None = None
    """Requests per second that it can sustain; None where that was not looked for, or not seen."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": len(self.runs),
            "disturbances": [asdict(d) for d in self.disturbances],
            "memory": None if self.memory is None else dict(self.memory),
            "runtime": self.runtime,
            "load_s": self.load_s,
            "capacity": self.capacity,
            "settings": dict(self.settings),
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """`baseline` is None unless both sides ran interleaved."""

    candidate: Side
    baseline: Side | None = None

    @property
    def sides(self) -> dict[str, Side]:
        return {"candidate": self.candidate} | ({"baseline": self.baseline} if self.baseline else {})

    def files(self) -> tuple[str, ...]:
        """Names of the files that `write` makes, relative to its folder."""
        return tuple(
            f"{_FOLDER}/{name}-{number}.jsonl"
            for name, side in self.sides.items()
            for number in range(len(side.runs))
        )

    def to_json(self) -> dict[str, Any]:
        return {"sides": {name: side.to_json() for name, side in self.sides.items()}}

    def write(self, folder: Path) -> None:
        """One file of request records per run."""
        (folder / _FOLDER).mkdir(exist_ok=True)
        for name, side in self.sides.items():
            for number, run in enumerate(side.runs):
                write_records(folder / _FOLDER / f"{name}-{number}.jsonl", run)

    @classmethod
    def read(cls, folder: Path, data: Mapping[str, Any]) -> Measured:
        """From the folder and the JSON that `to_json` gave. Raises DataError `records-damaged`."""
        sides = {
            name: Side(
                runs=tuple(
                    tuple(read_records(folder / _FOLDER / f"{name}-{number}.jsonl"))
                    for number in range(side["runs"])
                ),
                disturbances=tuple(Disturbance(**d) for d in side["disturbances"]),
                memory=side["memory"],
                runtime=side["runtime"],
                load_s=side["load_s"],
                capacity=side.get("capacity"),
                settings=side["settings"],
            )
            for name, side in data["sides"].items()
        }
        return cls(sides["candidate"], sides.get("baseline"))


def snapshot(
    data: Mapping[str, Any],
    side: Side,
    values: Mapping[str, float],
    *,
    reason: str,
    commit: str,
    recorded: str,
    measurement: str,
) -> Snapshot:
    """What a baseline keeps of a measurement; `data` is the measurement's JSON."""
    return Snapshot(
        engine=data["engine"],
        reason=reason,
        runs=side.runs,
        memory=side.memory or {},
        values=values,
        capacity=side.capacity,
        versions=data["versions"],
        settings=side.settings,
        commit=commit,
        recorded=recorded,
        measurement=measurement,
    )


def flat(runs: Sequence[Sequence[RequestRecord]]) -> list[RequestRecord]:
    """All requests of all runs."""
    return [record for run in runs for record in run]


def imported(files: Sequence[str], runtime: str = "") -> tuple[Measured, dict[str, Any]]:
    """Runs that another tool measured, a file each, and their workload: how many tokens each request had.

    runtime: what served them; default: what the first file says. Raises as `read_results`.
    """
    found = [read_results(Path(name)) for name in files]
    runs = tuple(tuple(run) for _, each in found for run in each)
    lengths = [[r.prompt_tokens, r.output_tokens] for r in runs[0]]
    side = Side(
        runs=runs,
        disturbances=(Disturbance(),) * len(runs),
        memory=None,
        runtime=runtime or found[0][0],
        load_s=None,
    )
    digest = hashlib.sha256(canonical_json(lengths).encode()).hexdigest()
    return Measured(side), {"name": "imported", "requests": len(lengths), "lengths": digest}
