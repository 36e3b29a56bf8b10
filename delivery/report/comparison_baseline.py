"""A measurement of compare as a baseline: where it is filed, and what is kept of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from delivery.bench.comparison import MEASUREMENT
from delivery.bench.measured import Measured, snapshot
from delivery.bench.session import BUNDLED
from delivery.report import compose
from delivery.report.latencies import values_of
from delivery.report.load import check_baseline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delivery.artifact import Artifact
    from delivery.device import DeviceFingerprint
    from delivery.gate.baseline import Snapshot
    from delivery.gate.lookup import Place


def place_ahead(model: str, device: DeviceFingerprint, workload: Mapping[str, Any]) -> Place:
    """Where the baseline of our own engine is filed, before anything is measured."""
    facts = {"device": asdict(device), "device_slug": device.slug, "workload": workload}
    return place_of(model, {**facts, "sides": {"candidate": {"runtime": BUNDLED}}})


def place_of(model: str, data: Mapping[str, Any]) -> Place:
    """Where the baseline of a compare measurement is filed; `data` is the measurement's JSON."""
    workload = {k: v for k, v in data["workload"].items() if k != "name"}
    return compose.place(model, data, {**workload, "runtime": data["sides"]["candidate"]["runtime"]})


def as_baseline(model: str, report: Artifact, reason: str, foreign_limit: float) -> tuple[Place, Snapshot]:
    """The candidate's runs from a measurement, or from a report about it, and where they are filed.

    foreign_limit: share of the device that other processes may have used.
    Raises Undecided `measurement-invalid` for an invalid measurement, which must not become a baseline.
    """
    data = json.loads(report.file(MEASUREMENT).read_text("utf-8"))
    measured = Measured.read(report.path, data)
    check_baseline(measured, data.get("offered_rate"), foreign_limit, report.path)
    taken = snapshot(
        data,
        measured.candidate,
        values_of(measured.candidate.runs),
        reason=reason,
        commit=compose.commit_of(report),
        recorded=compose.today(),
        measurement=compose.measurement_of(report),
    )
    return place_of(model, data), taken
