"""A family of latency metrics judged together from request records (`compare_runs`).

A run fails when one of several metrics is worse, and the more metrics are tested the
likelier a chance result is; their p-values are therefore corrected together (Holm 1979, step-down). A
run passes when *all* metrics are shown to be good, which needs no correction (intersection-union test,
Berger 1982).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from delivery.gate import latency, validity
from delivery.gate.bootstrap import RESAMPLES, RatioDraws, ratio_draws
from delivery.gate.latency import LIMIT, LatencyVerdict, Limits
from delivery.gate.looks import ONLY, Look
from delivery.gate.metrics import DEFAULT_FAMILY, definition, latency_kind, sample
from delivery.gate.report import Verdict, worst
from delivery.gate.validity import ValidityLimits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from delivery.gate.record import RequestRecord

    Runs = Sequence[Sequence[RequestRecord]]


@dataclass(frozen=True, slots=True)
class FamilyVerdict:
    """The verdict on a family: fail when any metric fails, pass when all pass.

    `undecided` asks for more pairs. `metrics` is empty when the measurement itself is invalid, and when
    the candidate rejected requests: the latencies of those that it did answer are not comparable.
    """

    status: Verdict
    reason: str
    metrics: Mapping[str, LatencyVerdict] = field(default_factory=dict)

    @property
    def undecided(self) -> bool:
        return self.status is Verdict.INCONCLUSIVE and any(m.undecided for m in self.metrics.values())


def compare_runs(
    baseline: Runs,
    candidate: Runs,
    *,
    metrics: Sequence[str] = DEFAULT_FAMILY,
    limit: float = LIMIT,
    floors_ms: Mapping[str, float] | None = None,
    paired: bool = True,
    look: Look = ONLY,
    valid: ValidityLimits | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> FamilyVerdict:
    """Judge validity first, then the family of `metrics` (names such as `tpot_p95_ms`).

    A candidate that rejected requests that the baseline answered fails, whatever its latencies.

    floors_ms: metric name → smallest difference that counts, over the metric's own default.
    Raises UsageError `unknown-metric` for a name that is not a request latency.
    """
    if reason := validity.why_invalid(baseline, candidate, valid or ValidityLimits(), paired):
        return FamilyVerdict(Verdict.INVALID, reason)
    if reason := validity.why_not_kept_up(candidate):
        return FamilyVerdict(Verdict.FAIL, reason)
    bootstraps: dict[str, tuple[RatioDraws, Limits, float]] = {}
    for name in metrics:
        kind, percentile = latency_kind(name)
        base, cand = _matched(baseline, candidate, kind, paired)
        if reason := latency.why_invalid(base, cand, paired):
            return FamilyVerdict(Verdict.INVALID, f"{name}: {reason}")
        floor_ms = (floors_ms or {}).get(name, definition(name).floor)
        draws = ratio_draws(base, cand, percentile=percentile, paired=paired, resamples=resamples, seed=seed)
        bootstraps[name] = draws, Limits(limit, floor_ms), percentile
    errors = holm({name: draws.p_not_above(1.0) for name, (draws, _, _) in bootstraps.items()}, look.error)
    verdicts = {
        name: latency.judge(draws, limits, look, errors[name], runs=len(candidate), percentile=percentile)
        for name, (draws, limits, percentile) in bootstraps.items()
    }
    status = worst([v.status for v in verdicts.values()])
    said = [f"{name}: {v.reason}" for name, v in verdicts.items() if v.status is status]
    return FamilyVerdict(status, "; ".join(said), verdicts)


def holm(p_values: Mapping[str, float], error: float) -> dict[str, float]:
    """The error that each hypothesis may use: error / (m − rank), 0 once a smaller p-value was kept."""
    allowed: dict[str, float] = {}
    stopped = False
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        share = error / (len(p_values) - rank)
        stopped = stopped or p > share
        allowed[name] = 0.0 if stopped else share
    return allowed


def _matched(
    baseline: Runs, candidate: Runs, kind: str, paired: bool
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """Samples per run; in paired runs only requests that both sides answered, in the same order."""
    if not paired:
        return [_samples(r, kind) for r in baseline], [_samples(r, kind) for r in candidate]
    left, right = [], []
    for theirs, ours in zip(baseline, candidate, strict=True):
        a, b = _by_id(theirs, kind), _by_id(ours, kind)
        common = [i for i in a if i in b]
        if common:
            left.append(np.array([a[i] for i in common]))
            right.append(np.array([b[i] for i in common]))
        else:
            left.append(_samples(theirs, kind))
            right.append(_samples(ours, kind))
    return left, right


def _by_id(run: Sequence[RequestRecord], kind: str) -> dict[str, float]:
    samples = ((r.id, sample(r, kind)) for r in run if r.error is None)
    return {i: value for i, value in samples if value is not None}


def _samples(run: Sequence[RequestRecord], kind: str) -> NDArray[np.float64]:
    return np.array(list(_by_id(run, kind).values()), dtype=np.float64)
