"""The contexts of a running step (`StepContext`) and of a verdict (`JudgeContext`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from delivery.artifact import Artifact, Json
    from delivery.pipeline.events import RunLog
    from delivery.pipeline.progress import Display
    from delivery.steps.step import Direction, Severity, Task


@dataclass(frozen=True, slots=True)
class Reporter:
    """Where a step's progress, metrics and findings go: the display and the run's log."""

    stage: str
    display: Display
    log: RunLog


class _Roles:
    """Access to input artifacts by role."""

    bound: Mapping[str, tuple[Artifact, ...]]

    def input(self, role: str) -> Artifact:
        """The artifact of a role. Raises LookupError for an unbound role: check with `has` first."""
        found = self.bound.get(role, ())
        if len(found) != 1:
            raise LookupError(f"input {role!r} has {len(found)} artifacts, not one")
        return found[0]

    def inputs(self, role: str) -> list[Artifact]:
        """All artifacts of a role; empty if it is unbound."""
        return list(self.bound.get(role, ()))

    def has(self, role: str) -> bool:
        return bool(self.bound.get(role))


@dataclass
class RunContext(_Roles):
    """Implements `delivery.steps.step.StepContext`."""

    out: Path
    scratch: Path
    device: str
    seed: int
    bound: Mapping[str, tuple[Artifact, ...]]
    reporter: Reporter
    gate: Mapping[str, Json] = field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[dict[str, str]] = field(default_factory=list)

    def progress(self, title: str, total: float, unit: str) -> Task:
        self.reporter.log.event("task", stage=self.reporter.stage, title=title, total=total, unit=unit)
        return self.reporter.display.task(title, total, unit)

    def metric(self, name: str, value: float, unit: str, direction: Direction) -> None:
        if not math.isfinite(value):  # JSON has no such number
            self.finding("error", f"{name} is {value}")
            return
        self.metrics[name] = {"value": value, "unit": unit, "direction": direction}
        self.reporter.log.event("metric", stage=self.reporter.stage, name=name, value=value, unit=unit)

    def finding(self, severity: Severity, text: str) -> None:
        self.findings.append({"severity": severity, "text": text})
        self.reporter.log.event("finding", stage=self.reporter.stage, severity=severity, text=text)
        self.reporter.display.line(f"  {severity}: {text}")


@dataclass
class Judgement(_Roles):
    """Implements `delivery.steps.step.JudgeContext`."""

    measurement: Artifact
    out: Path
    model: str
    gate: Mapping[str, Json]
    baselines: Path
    local_baselines: Path
    bound: Mapping[str, tuple[Artifact, ...]]
