"""Baselines: the raw runs that a candidate is compared with, one file per model, device and workload.

`<root>/<model>/<device>/<workload digest>.json`. A baseline changes only by `deliver baseline update`,
with a reason. It also keeps the runs of the last release (the *anchor*), so that losses just under the
limit on every commit add up to a failure instead of going unnoticed.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from delivery.errors import DataError
from delivery.gate.record import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SCHEMA = 1
HISTORY_LENGTH = 200
_COLUMNS = ("id", "scheduled_s", "sent_s", "first_token_s", "last_token_s", "prompt_tokens", "output_tokens")
_MICROSECONDS = 6

Runs = tuple[tuple[RequestRecord, ...], ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One accepted measurement: which engine, why it was accepted, its raw runs and its memory."""

    engine: str
    """Digest of the engine that was measured."""
    reason: str
    runs: Runs
    memory: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    """Other numbers by metric name: percentiles, quality."""
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Raw values that are not requests, by name: timings in ms."""
    capacity: float | None = None
    """Requests per second that the engine could sustain; None where the workload is a closed loop."""
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    commit: str = ""
    recorded: str = ""
    """Day of the measurement, ISO 8601."""
    measurement: str = ""
    """Digest of the report artifact whose measurement this is."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The accepted measurement of `model` with one workload on one device, and that of its last release."""

    model: str
    device: Mapping[str, Any]
    workload: Mapping[str, Any]
    workload_digest: str
    current: Snapshot
    anchor: Snapshot | None = None
    """The last release; None when it is `current` itself."""
    bootstrapped: bool = False
    history: tuple[Mapping[str, Any], ...] = ()
    """Earlier and present snapshots, oldest first: engine, reason, commit, recorded, values."""

    def updated(self, snapshot: Snapshot, *, released: bool) -> Baseline:
        """The baseline with a new snapshot. The anchor stays where it was unless this was `released`."""
        anchor = None if released else (self.anchor or self.current)
        return replace(
            self,
            current=snapshot,
            anchor=anchor,
            bootstrapped=False,
            history=(*self.history, _history_row(snapshot))[-HISTORY_LENGTH:],
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "device": dict(self.device),
            "workload": dict(self.workload),
            "workload_digest": self.workload_digest,
            "bootstrapped": self.bootstrapped,
            "current": _snapshot_json(self.current),
            "anchor": None if self.anchor is None else _snapshot_json(self.anchor),
            "history": [dict(row) for row in self.history],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Baseline:
        return cls(
            model=data["model"],
            device=data["device"],
            workload=data["workload"],
            workload_digest=data["workload_digest"],
            bootstrapped=data["bootstrapped"],
            current=_snapshot(data["current"]),
            anchor=None if data["anchor"] is None else _snapshot(data["anchor"]),
            history=tuple(data["history"]),
        )


def new(
    model: str,
    device: Mapping[str, Any],
    workload: Mapping[str, Any],
    workload_digest: str,
    snapshot: Snapshot,
    *,
    bootstrapped: bool,
) -> Baseline:
    """A first baseline, whose history is its only snapshot."""
    return Baseline(
        model=model,
        device=device,
        workload=workload,
        workload_digest=workload_digest,
        current=snapshot,
        bootstrapped=bootstrapped,
        history=(_history_row(snapshot),),
    )


def location(root: Path, model: str, device_slug: str, workload_digest: str) -> Path:
    """The path of a baseline. The model's name is reduced to characters allowed in file names."""
    return root / model_folder(model) / device_slug / f"{workload_digest[:16]}.json"


def model_folder(model: str) -> str:
    """A model's name as a folder: letters, digits, dots and dashes, never a path."""
    kept = "".join(c if c.isalnum() or c in "-_." else "-" for c in model).strip("-.")
    return kept or "model"


def read(path: Path) -> Baseline:
    """Raises DataError `baseline-damaged`."""
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}, this version reads {SCHEMA}")
        return Baseline.from_json(data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            "baseline-damaged",
            f"{path} is not a baseline",
            why=f"{type(error).__name__}: {error}",
            hint="restore it from version control, or delete it, then: deliver baseline update --reason TEXT",
        ) from error


def write(path: Path, baseline: Baseline) -> None:
    """Write atomically; folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(_dump(baseline.to_json()), "utf-8")
    os.replace(temporary, path)


def other_devices(root: Path, model: str, workload_digest: str, device_slug: str) -> list[str]:
    """Devices other than this one that have a baseline of the same model and workload."""
    folder = root / model_folder(model)
    found = folder.glob(f"*/{workload_digest[:16]}.json") if folder.is_dir() else ()
    return sorted(p.parent.name for p in found if p.parent.name != device_slug)


def _history_row(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "engine": snapshot.engine,
        "reason": snapshot.reason,
        "commit": snapshot.commit,
        "recorded": snapshot.recorded,
        "values": dict(snapshot.values),
    }


def _snapshot_json(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "engine": snapshot.engine,
        "reason": snapshot.reason,
        "commit": snapshot.commit,
        "recorded": snapshot.recorded,
        "measurement": snapshot.measurement,
        "versions": dict(snapshot.versions),
        "settings": dict(snapshot.settings),
        "memory": dict(snapshot.memory),
        "values": dict(snapshot.values),
        "capacity": snapshot.capacity,
        "samples": {name: list(values) for name, values in snapshot.samples.items()},
        "columns": list(_COLUMNS),
        "runs": [[_row(r) for r in run] for run in snapshot.runs],
    }


def _row(record: RequestRecord) -> list[Any]:
    values = [getattr(record, name) for name in _COLUMNS]
    return [round(v, _MICROSECONDS) if isinstance(v, float) else v for v in values]


def _snapshot(data: Mapping[str, Any]) -> Snapshot:
    columns: Sequence[str] = data["columns"]
    return Snapshot(
        engine=data["engine"],
        reason=data["reason"],
        commit=data["commit"],
        recorded=data["recorded"],
        measurement=data["measurement"],
        versions=data["versions"],
        settings=data["settings"],
        memory=data["memory"],
        values=data["values"],
        samples=data["samples"],
        capacity=data.get("capacity"),
        runs=tuple(
            tuple(RequestRecord(**dict(zip(columns, row, strict=True))) for row in run)
            for run in data["runs"]
        ),
    )


def _dump(data: Mapping[str, Any]) -> str:
    """Indented JSON with one request per line, so that a diff of a baseline can be read."""
    runs: list[str] = []
    mark = secrets.token_hex(16)  # in no text of the baseline, whatever its reason or its settings say

    def fold(snapshot: dict[str, Any] | None) -> None:
        for number, run in enumerate(snapshot["runs"] if snapshot else ()):
            assert snapshot is not None
            rows = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in run)
            runs.append(f"[\n{rows}\n   ]")
            snapshot["runs"][number] = f"{mark}-{len(runs) - 1}"

    copied = json.loads(json.dumps(data, allow_nan=False))
    fold(copied["current"])
    fold(copied["anchor"])
    text = json.dumps(copied, indent=1, ensure_ascii=False, allow_nan=False)
    for number, block in enumerate(runs):
        text = text.replace(f'"{mark}-{number}"', block)
    return text + "\n"
