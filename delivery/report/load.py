"""The load of a comparison: whether it is valid, fair to the baseline, and sustained by both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delivery.errors import Undecided
from delivery.gate import validity
from delivery.gate.capacity import shown, why_too_fast
from delivery.gate.metrics import definition
from delivery.gate.report import Finding, Metric, Verdict
from delivery.report.comparison_parts import Part

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from delivery.bench.measured import Measured, Side
    from delivery.gate.record import RequestRecord


SAME_ENGINE = (
    "this engine is the baseline's own: what differs is the machine, or deliver itself; measure again, and "
    "see `deliver baseline noise`"
)
"""What to say of a slow-down that the engine cannot have caused."""


def why_worthless(measured: Measured, rate: float | None, foreign_limit: float) -> str:
    """Why a measurement is invalid, whatever it is compared with; empty when it can be judged.

    rate: requests/s of an open loop. foreign_limit: the share of the device that others may use.
    """
    for name, side in measured.sides.items():
        for number, disturbance in enumerate(side.disturbances, 1):
            if reason := disturbance.why_invalid(foreign_limit):
                return f"{name} run {number}: {reason}"
    if reason := _why_unfair_beside(rate, measured):
        return reason
    limits = validity.ValidityLimits()
    for number, run in enumerate(measured.candidate.runs, 1):
        if reason := validity.why_invalid_run(run, limits, judged=True):
            return f"candidate run {number}: {reason}"
    return _why_runs_differ(measured.candidate.runs)


def _why_runs_differ(runs: Sequence[Sequence[RequestRecord]]) -> str:
    """Unequal output lengths among the runs of one side; empty when every run asked the same."""
    lengths = [{r.id: r.output_tokens for r in run if r.error is None} for run in runs]
    for number, other in enumerate(lengths[1:], 2):
        for name, tokens in lengths[0].items():
            if other.get(name, tokens) != tokens:
                return (
                    f"output lengths differ between the runs: {name} has {tokens} tokens in run 1 "
                    f"and {other[name]} in run {number}"
                )
    return ""


def why_no_baseline(measured: Measured, rate: float | None, foreign_limit: float) -> str:
    """Why a measurement cannot become a baseline; empty when it can."""
    side = measured.candidate
    reason = why_worthless(measured, rate, foreign_limit) or validity.why_not_kept_up(side.runs)
    return reason or ("" if rate is None else why_too_fast(rate, side.capacity))


def check_baseline(measured: Measured, rate: float | None, foreign_limit: float, path: Path) -> None:
    """Raises Undecided `measurement-invalid` for the measurement in `path` where it cannot become a
    baseline: everything would be held against it."""
    if why := why_no_baseline(measured, rate, foreign_limit):
        raise Undecided(
            "measurement-invalid",
            f"{path} cannot become a baseline",
            why=why,
            hint="deliver compare measures again",
        )


def _why_unfair_beside(rate: float | None, measured: Measured) -> str:
    """Why an open loop was too fast for the engine that ran side by side; empty when it was not."""
    if rate is None or measured.baseline is None:
        return ""
    return why_too_fast(rate, measured.baseline.capacity)


def kept_up(rate: float | None, side: Side, baseline: float | None) -> Part:
    """Whether the candidate sustains the load. rate: None in a closed loop. baseline: its requests/s."""
    metrics = _turned_away(side)
    if rate is None:
        return Part(Verdict.FAIL if metrics else Verdict.PASS, metrics)
    if side.capacity is None:
        text = "the candidate's capacity is unknown: the probe was disturbed or failed"
        return Part(Verdict.INVALID, metrics, [Finding("error", text)])
    status = Verdict.PASS if side.capacity >= rate else Verdict.FAIL
    about = definition("request_capacity")
    metrics.append(
        Metric(
            about.name,
            side.capacity,
            about.unit,
            about.direction,
            limit=rate,
            status=status.value,
            baseline=baseline,
        )
    )
    if status is Verdict.FAIL:
        most = shown(side.capacity)
        text = f"the candidate cannot keep up with {shown(rate)} requests/s: it can sustain {most}"
        return Part(status, metrics, [Finding("error", text)])
    fair = f", {rate / baseline:.0%} of what the baseline can sustain" if baseline else ""
    text = f"the load was {shown(rate)} requests/s{fair}"
    return Part(Verdict.FAIL if len(metrics) > 1 else status, metrics, [Finding("info", text)])


def not_seen(name: str) -> str:
    """What to say of a target that this measurement has no number for."""
    return f"the target {name} was not measured: an open loop, or an engine and not a URL, would show it"


def no_effect(name: str) -> str:
    """What to say of a limit that this measurement has no number for; another check may have one."""
    return f"the limit {name} has no effect here: it was not measured"


def _turned_away(side: Side) -> list[Metric]:
    """The share of requests that the candidate turned away, as a failure; nothing when there are none."""
    asked = sum(map(len, side.runs))
    lost = sum(map(validity.turned_away, side.runs))
    if not lost:
        return []
    about = definition("failed_requests_ratio")
    return [Metric(about.name, lost / asked, about.unit, about.direction, limit=0.0, status=Verdict.FAIL)]
