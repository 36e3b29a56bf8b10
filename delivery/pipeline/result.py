"""The results of a run, per stage and as a whole: as values, as JSON and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivery.artifact import Kind
from delivery.gate.report import Verdict
from delivery.pipeline.refs import short
from delivery.report.words import amount

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from delivery.artifact import Artifact, Json
    from delivery.errors import DeliverError
    from delivery.gate.report import Report

REPORT_PAGE = "report.html"


@dataclass(frozen=True, slots=True)
class StageResult:
    """`key` is the cache key, `record` the artifact's `run.json`; `report` and `error` are a check's."""

    name: str
    key: str
    artifact: Artifact
    cached: bool
    seconds: float
    record: Mapping[str, Json]
    report: Report | None = None
    error: DeliverError | None = None

    def metrics(self) -> dict[str, float]:
        """Metric → value: the report's, or those that the step recorded."""
        if self.report is not None:
            return {m.name: m.value for m in self.report.metrics}
        return {name: m["value"] for name, m in self.record.get("metrics", {}).items()}

    def to_json(self) -> dict[str, Json]:
        return {
            "name": self.name,
            "artifact": self.artifact.digest,
            "path": str(self.artifact.path),
            "cached": self.cached,
            "seconds": round(self.seconds, 3),
            "passed": self.error is None,
            "metrics": self.metrics(),
        }


@dataclass(frozen=True, slots=True)
class RunResult:
    """`complete` says whether every stage of the pipeline is in `steps`."""

    steps: tuple[StageResult, ...]
    error: DeliverError | None
    complete: bool

    @property
    def release(self) -> Path | None:
        """The folder of the release, if one was made."""
        return next((s.artifact.path for s in self.steps[::-1] if s.artifact.kind == Kind.RELEASE), None)

    @property
    def report_page(self) -> Path | None:
        """The HTML report worth opening: the release's, else the last check's."""
        pages = [s.artifact.file(REPORT_PAGE) for s in self.steps[::-1]]
        return next((page for page in pages if page.is_file()), None)

    def to_json(self) -> dict[str, Json]:
        """The object that `deliver run --json` prints."""
        out: dict[str, Json] = {
            "passed": self.error is None,
            "steps": [s.to_json() for s in self.steps],
            "release": str(self.release) if self.release else None,
        }
        if self.error is not None:
            out["error"] = self.error.to_json()
        return out

    def last_line(self) -> str:
        """For a run that passed: 'passed', with any waivers and bootstrapped baselines it relied on."""
        owed = []
        for step in self.steps:
            if step.report is None:
                continue
            if step.report.verdict == Verdict.BOOTSTRAPPED:
                owed.append(f"{step.name} bootstrapped its baseline")
            for metric in step.report.metrics:
                if metric.status == Verdict.WAIVED:
                    owed.append(f"{metric.name} is waived")
        return f"passed, but {'; '.join(owed)}" if owed else "passed"


def run_record(steps: Iterable[StageResult]) -> dict[str, Json]:
    """The record kept in `runs/<id>/run.json`."""
    return {"steps": [{**s.to_json(), "key": s.key} for s in steps]}


def table(result: RunResult) -> str:
    """Stages and their metrics, in aligned columns."""
    rows = [("stage", "artifact", "time", "peak", "measured")]
    for step in result.steps:
        time_text = "cached" if step.cached else f"{step.seconds:.1f} s"
        peak = step.record.get("peak_rss_bytes")
        lines = _measured(step) or [""]
        rows.append((step.name, short(step.artifact.digest), time_text, size(peak), lines[0]))
        rows += [("", "", "", "", line) for line in lines[1:]]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    )


def size(size_bytes: int | None) -> str:
    """Bytes in readable units: '1.2 GiB'; '' for None."""
    return "" if size_bytes is None else amount(size_bytes, "bytes")


def _measured(step: StageResult) -> list[str]:
    if step.report is None:
        return [
            f"{name} {amount(m['value'], m['unit'])}" for name, m in step.record.get("metrics", {}).items()
        ]
    lines = [f"{step.report.verdict.value}"]
    for m in step.report.metrics:
        limit = "" if m.limit is None else f", limit {amount(m.limit, m.unit)}"
        base = "" if m.baseline is None else f", baseline {amount(m.baseline, m.unit)}"
        status = "" if m.status == "shown" else f" [{m.status}]"
        lines.append(f"{m.name} {amount(m.value, m.unit)}{base}{limit}{status}")
    return lines
