"""Timed runs of smoke in a report: their metrics, alone or against a baseline's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from delivery.gate.limits import judge
from delivery.gate.report import Finding, Metric, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delivery.gate.alarm import Alarm

_METRICS = (("smoke_p50_ms", 50), ("smoke_p95_ms", 95))


def metrics(
    timings_ms: Sequence[float],
    baseline_ms: Sequence[float] | None = None,
    limit: float = 1.15,
    alarm: Alarm | None = None,
    limits: Mapping[str, Any] | None = None,
) -> list[Metric]:
    """P50 and P95 in ms; judged together where there is a baseline, and by absolute `limits`."""
    out = []
    for name, percentile in _METRICS:
        value = float(np.percentile(timings_ms, percentile))
        absolute = judge(name, value, limits or {})
        if absolute.status == Verdict.FAIL:
            out.append(absolute)
            continue
        if baseline_ms is None or alarm is None:
            out.append(absolute)
            continue
        before = float(np.percentile(baseline_ms, percentile))
        status = Verdict.FAIL if alarm.rings else Verdict.PASS
        interval = tuple(before * edge for edge in alarm.interval) if percentile == 50 else None
        out.append(
            Metric(
                name,
                value,
                "ms",
                "lower",
                limit=before * limit,
                status=status.value,
                baseline=before,
                interval=None if interval is None else (interval[0], interval[1]),
            )
        )
    return out


def finding(alarm: Alarm) -> Finding:
    """What ten runs say, and that they do not decide alone."""
    low, high = alarm.interval
    return Finding(
        "error" if alarm.rings else "info",
        f"timed runs: P50 {alarm.p50_ratio - 1:+.0%}, P95 {alarm.p95_ratio - 1:+.0%} against the baseline "
        f"(90 % interval of the P50's ratio {low:.2f} to {high:.2f}); compare gives the binding verdict",
    )
