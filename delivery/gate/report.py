"""Report: the verdict on one subject, the source of every rendering (`report.json`)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SCHEMA = 1
FILE_NAME = "report.json"

Direction = Literal["lower", "higher", "both"]
Severity = Literal["info", "warning", "error"]


class Verdict(StrEnum):
    """The outcome of a check, worst last in `WORST_LAST`."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    INVALID = "invalid"
    BOOTSTRAPPED = "bootstrapped"
    WAIVED = "waived"

    @property
    def releases(self) -> bool:
        """Whether a subject with this verdict may be packaged."""
        return self in (Verdict.PASS, Verdict.BOOTSTRAPPED, Verdict.WAIVED)


WORST_LAST = (
    Verdict.PASS,
    Verdict.BOOTSTRAPPED,
    Verdict.WAIVED,
    Verdict.INCONCLUSIVE,
    Verdict.INVALID,
    Verdict.FAIL,
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured value and how it was judged.

    `limit` is in the metric's own unit, None when shown only; `status` is a Verdict value or "shown".
    `interval` is the 90 % interval where one was computed; `baseline` the value compared with.
    """

    name: str
    value: float
    unit: str
    direction: Direction
    limit: float | None = None
    status: str = "shown"
    baseline: float | None = None
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence for the reader of the report."""

    severity: Severity
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """`subject` is the digest of what was judged, `check` the step that judged it."""

    check: str
    subject: str
    verdict: Verdict
    metrics: tuple[Metric, ...] = ()
    findings: tuple[Finding, ...] = ()
    evidence: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    """Tables and series for the HTML report, by name; plain JSON."""

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "check": self.check,
            "subject": self.subject,
            "verdict": self.verdict.value,
            "metrics": [
                {
                    "name": m.name,
                    "value": m.value,
                    "unit": m.unit,
                    "direction": m.direction,
                    "limit": m.limit,
                    "status": m.status,
                    "baseline": m.baseline,
                    "interval": None if m.interval is None else list(m.interval),
                }
                for m in self.metrics
            ],
            "findings": [{"severity": f.severity, "text": f.text} for f in self.findings],
            "evidence": list(self.evidence),
            "details": dict(self.details),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        return cls(
            check=data["check"],
            subject=data["subject"],
            verdict=Verdict(data["verdict"]),
            metrics=tuple(
                Metric(**{**m, "interval": tuple(m["interval"]) if m.get("interval") else None})
                for m in data["metrics"]
            ),
            findings=tuple(Finding(**f) for f in data["findings"]),
            evidence=tuple(data["evidence"]),
            details=data.get("details", {}),
        )

    def write(self, directory: Path) -> None:
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
        # Half of a surrogate pair, from a server's JSON, becomes the escape that JSON has for it.
        (directory / FILE_NAME).write_text(text + "\n", "utf-8", errors="backslashreplace")

    @classmethod
    def read(cls, directory: Path) -> Report:
        return cls.from_json(json.loads((directory / FILE_NAME).read_text("utf-8")))


def worst(verdicts: list[Verdict]) -> Verdict:
    """The verdict of a whole: the worst of its parts, PASS when there are none."""
    return max(verdicts, key=WORST_LAST.index, default=Verdict.PASS)
