"""Latency and memory in a report: metrics, findings and charts of a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from delivery.bench.measured import flat
from delivery.gate import noise
from delivery.gate.memory import MemoryVerdict
from delivery.gate.metrics import definition, latency_kind, sample
from delivery.gate.report import WORST_LAST, Finding, Metric, Verdict
from delivery.gate.summary import summarize
from delivery.report import charts, words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delivery.bench.measured import Side
    from delivery.gate.baseline import Baseline
    from delivery.gate.family import FamilyVerdict
    from delivery.gate.record import RequestRecord

    Runs = Sequence[Sequence[RequestRecord]]

_KINDS = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el"}
_PARTS = ("weights_bytes", "peak_bytes", "overhead_bytes", "kv_bytes")


def metrics(verdict: FamilyVerdict, limit: float) -> list[Metric]:
    """The judged family: values in ms, limits and intervals in ms too."""
    return [
        Metric(
            name=name,
            value=v.candidate_ms,
            unit="ms",
            direction="lower",
            limit=v.baseline_ms * limit,
            status=v.status.value,
            baseline=v.baseline_ms,
            interval=(v.baseline_ms * v.interval[0], v.baseline_ms * v.interval[1]),
        )
        for name, v in verdict.metrics.items()
    ]


def values_of(runs: Runs) -> dict[str, float]:
    """Metric name → value over all requests; throughputs are the mean over runs."""
    whole = summarize(flat(runs))
    out = {f"{name}_p{p}_ms": whole[f"p{p}_{key}_ms"] for name, key in _KINDS.items() for p in (50, 95, 99)}
    out["schedule_delay_p50_ms"] = whole["p50_schedule_delay_ms"]
    each = [summarize(run) for run in runs]
    for name in ("request_throughput", "output_throughput"):
        out[name] = float(np.mean([one[name] for one in each]))
    out["failed_requests_ratio"] = whole["failed"] / max(len(whole["errors"]), 1)
    return out


def shown(side: Side) -> list[Metric]:
    """Everything that was measured, unjudged."""
    values = values_of(side.runs)
    values |= {k: v for k, v in (side.memory or {}).items() if k in (*_PARTS, "kv_tokens", "process_bytes")}
    values |= {} if side.load_s is None else {"load_s": side.load_s}
    values |= {} if side.capacity is None else {"request_capacity": side.capacity}
    return [_shown(name, value) for name, value in values.items()]


def merged(metrics: Sequence[Metric], more: Sequence[Metric]) -> list[Metric]:
    """One metric per name: of two, the one with the worse status, the first when they are equal."""
    out: dict[str, Metric] = {}
    for metric in (*metrics, *more):
        if metric.name not in out or _rank(metric) > _rank(out[metric.name]):
            out[metric.name] = metric
    return list(out.values())


def memory_metrics(verdict: MemoryVerdict, limit: float) -> list[Metric]:
    """Weights and activation peak with their baseline, and the limit on the side to which they moved."""
    return [
        Metric(
            name,
            part.candidate,
            "bytes",
            "both",
            limit=part.baseline * (1 + limit if part.candidate >= part.baseline else 1 - limit),
            status=part.status.value,
            baseline=part.baseline,
        )
        for name, part in verdict.components.items()
        if part.candidate == part.candidate  # not NaN
    ]


def over_limit(judged: Sequence[Metric]) -> list[Finding]:
    """A sentence per metric over its absolute target."""
    return [
        Finding(
            "error",
            f"{words.title(m.name)} is {words.amount(m.value, m.unit)}, target {words.limit(m)}",
        )
        for m in judged
        if m.status == Verdict.FAIL
    ]


def noise_findings(runs: Runs, family: Sequence[str]) -> list[Finding]:
    """A warning where runs of one engine differ by more than 5 %."""
    out = []
    for name in family:
        kind, percentile = latency_kind(name)
        if not all(_samples(run, kind) for run in runs):
            continue  # a run without an answer has no percentile
        found = noise.measure([_samples(run, kind) for run in runs], percentile)
        if found.noisy:
            out.append(
                Finding(
                    "warning",
                    f"{name} differs by {found.spread:.1%} between runs of the same engine; the smallest "
                    f"slow-down that {found.runs} runs show reliably is {found.minimum_effect:.0%}",
                )
            )
    return out


def charts_of(
    side: Side,
    baseline: Runs | None,
    baseline_memory: Mapping[str, float] | None,
    family: Sequence[str],
) -> list[dict[str, Any]]:
    """Distributions, every run's percentile, and the memory's parts."""
    out = []
    for name in family:
        kind, percentile = latency_kind(name)
        sides = ({"baseline": baseline} if baseline else {}) | {"candidate": side.runs}
        samples = {label: _samples(flat(runs), kind) for label, runs in sides.items()}
        title = f"{words.title(name).partition(',')[0]}, all runs"
        out.append(charts.distribution(title, "ms", samples, percentile))
    first, percentile = latency_kind(family[0])
    title = f"{words.title(family[0])} of every run"
    ours = [_percentile(_samples(run, first), percentile) for run in side.runs]
    if baseline and len(baseline) == len(ours):
        theirs = [_percentile(_samples(run, first), percentile) for run in baseline]
        out.append(charts.pairs(title, "ms", theirs, ours))
    else:
        out.append(charts.bars(title, "ms", [str(i + 1) for i in range(len(ours))], {"candidate": ours}))
    rows = {"baseline": baseline_memory, "candidate": side.memory}
    parts = {label: _parts(memory) for label, memory in rows.items() if memory}
    return [*out, charts.stack("Memory", "bytes", parts)] if parts else out


def trend(baseline: Baseline | None, side: Side, family: Sequence[str]) -> list[dict[str, Any]]:
    """The family over the baseline's history up to this candidate, where there is a history.

    In per cent of its first value each, so that milliseconds and seconds can be seen side by side.
    """
    if baseline is None or (len(baseline.history) < 2 and baseline.bootstrapped):
        return []
    now = values_of(side.runs)
    labels = [str((row.get("commit") or row["engine"])[:7]) for row in baseline.history] + ["now"]
    series = {
        name: _per_cent([row["values"].get(name) for row in baseline.history] + [now.get(name)])
        for name in family
    }
    return [charts.line("Over the baseline's history, by commit", "% of the first", labels, series)]


def _per_cent(values: Sequence[float | None]) -> list[float | None]:
    first = next((v for v in values if v), None)
    return [None if v is None or first is None else v / first * 100 for v in values]


def _samples(run: Sequence[RequestRecord], kind: str) -> list[float]:
    return [v for r in run if r.error is None and (v := sample(r, kind)) is not None]


def _percentile(samples: Sequence[float], percentile: float) -> float:
    """0 for a run in which nothing was answered."""
    return float(np.percentile(samples, percentile)) if samples else 0.0


def _parts(memory: Mapping[str, float]) -> dict[str, float]:
    return {name.removesuffix("_bytes"): memory[name] for name in _PARTS if name in memory}


def _shown(name: str, value: float) -> Metric:
    about = definition(name)
    return Metric(name, value, about.unit, about.direction)


def _rank(metric: Metric) -> int:
    return -1 if metric.status == "shown" else WORST_LAST.index(Verdict(metric.status))
