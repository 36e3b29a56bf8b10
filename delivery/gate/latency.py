"""The latency gate on plain arrays: one metric, one look (`compare_latency`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from delivery.gate.bootstrap import RESAMPLES, RatioDraws, ratio_draws
from delivery.gate.looks import MIN_RUNS, ONLY, Look
from delivery.gate.report import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LIMIT = 1.15
PERCENTILE = 95.0
MIN_REQUESTS = 130
"""Fewer leave under seven samples above a P95, too few to resample."""
MAX_HALF_WIDTH = 0.10
_ROUNDING = 1e-9
"""A ratio of exactly the limit passes, however its last digits were rounded."""


@dataclass(frozen=True, slots=True)
class LatencyVerdict:
    """The comparison of one latency percentile.

    ratio: geometric mean over runs of candidate / baseline. interval: what the bootstrap leaves of it
    at this look's error (90 % for a single look). Values in ms. `undecided` is True when neither a
    failure nor a pass is shown and more pairs would help; the status then is "inconclusive".
    """

    status: Verdict
    reason: str
    ratio: float = float("nan")
    interval: tuple[float, float] = (float("nan"), float("nan"))
    baseline_ms: float = float("nan")
    candidate_ms: float = float("nan")
    runs: int = 0
    p_value: float = float("nan")
    undecided: bool = False

    @property
    def half_width(self) -> float:
        """Half of the interval on the log scale, as a share: 0.05 is ±5 %."""
        return _half_width(self.interval)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a regression is: a ratio over `ratio` and a difference over `floor_ms`."""

    ratio: float = LIMIT
    floor_ms: float = 0.0


def compare_latency(
    baseline: Sequence[Sequence[float]],
    candidate: Sequence[Sequence[float]],
    limit: float = LIMIT,
    percentile: float = PERCENTILE,
    floor_ms: float = 0.0,
    paired: bool = True,
    seed: int = 0,
    *,
    look: Look = ONLY,
    resamples: int = RESAMPLES,
) -> LatencyVerdict:
    """Judge one latency metric from raw samples in ms, one inner sequence per run.

    paired: run i of the baseline was measured beside run i of the candidate. Both sides need at least
    5 runs of at least 130 finite, positive samples; otherwise the status is "invalid". `look` is one of
    `looks.looks()` while more pairs may follow; by default this is the only look, with a 90 % interval.
    Raises ValueError for a limit that is not a finite number above 1, a floor that is not a finite number
    from 0 on, or a percentile outside (0, 100).
    """
    if not 1.0 < limit < float("inf"):
        raise ValueError(f"a limit on a ratio is above 1 and finite, got {limit}")
    if not 0.0 <= floor_ms < float("inf"):
        raise ValueError(f"a floor is a number of ms from 0 on, got {floor_ms}")
    if not 0.0 < percentile < 100.0:
        raise ValueError(f"a percentile lies between 0 and 100, got {percentile}")
    base, cand = _arrays(baseline), _arrays(candidate)
    if reason := why_invalid(base, cand, paired):
        return LatencyVerdict(Verdict.INVALID, reason)
    draws = ratio_draws(base, cand, percentile=percentile, paired=paired, resamples=resamples, seed=seed)
    return judge(draws, Limits(limit, floor_ms), look, look.error, runs=len(cand), percentile=percentile)


def judge(
    draws: RatioDraws, limits: Limits, look: Look, error: float, *, runs: int, percentile: float = PERCENTILE
) -> LatencyVerdict:
    """Apply the rule to one bootstrap. `error` may be smaller than the look's where metrics share it."""
    ratio, difference = draws.ratio, draws.candidate_ms - draws.baseline_ms
    interval = draws.interval(look.error)
    p_value = draws.p_not_above(1.0)
    over = ratio > limits.ratio + _ROUNDING and difference > limits.floor_ms
    worse = p_value <= error
    half_width = _half_width(interval)
    said = (
        f"P{percentile:g} {draws.candidate_ms:.2f} ms against {draws.baseline_ms:.2f} ms: "
        f"{_percent(ratio)} ({(1 - 2 * look.error) * 100:.0f} % interval {_percent(interval[0])} to "
        f"{_percent(interval[1])}, limit {_percent(limits.ratio)})"
    )
    undecided = False
    if over and worse:
        status, reason = Verdict.FAIL, said
    elif interval[1] <= limits.ratio + _ROUNDING:
        status, reason = Verdict.PASS, said
    elif not look.last:
        status, undecided = Verdict.INCONCLUSIVE, True
        reason = f"{said}; undecided after {look.pairs} pairs"
    elif half_width > MAX_HALF_WIDTH:
        status = Verdict.INCONCLUSIVE
        reason = f"{said}; the interval is ±{half_width * 100:.0f} %, over ±{MAX_HALF_WIDTH * 100:.0f} %"
    elif over:
        status, reason = Verdict.FAIL, said
    else:
        status, reason = Verdict.PASS, said
        if ratio > limits.ratio + _ROUNDING:
            reason = f"{said}; the difference is under the floor of {limits.floor_ms:g} ms"
    return LatencyVerdict(
        status=status,
        reason=reason,
        ratio=ratio,
        interval=interval,
        baseline_ms=draws.baseline_ms,
        candidate_ms=draws.candidate_ms,
        runs=runs,
        p_value=p_value,
        undecided=undecided,
    )


def why_invalid(
    baseline: Sequence[NDArray[np.float64]], candidate: Sequence[NDArray[np.float64]], paired: bool
) -> str:
    """Why the samples cannot be judged; empty when they can."""
    for side, runs in (("baseline", baseline), ("candidate", candidate)):
        if len(runs) < MIN_RUNS:
            return f"the {side} has {len(runs)} runs, {MIN_RUNS} are needed"
        for number, run in enumerate(runs, 1):
            bad = int(np.count_nonzero(~(np.isfinite(run) & (run > 0.0))))
            if bad:
                return f"{side} run {number} holds {bad} samples that are not finite and positive"
            if run.size < MIN_REQUESTS:
                return f"{side} run {number} has {run.size} requests, {MIN_REQUESTS} are needed"
    if paired and len(baseline) != len(candidate):
        return f"{len(baseline)} baseline runs cannot be paired with {len(candidate)} candidate runs"
    return ""


def _arrays(runs: Sequence[Sequence[float]]) -> list[NDArray[np.float64]]:
    return [np.asarray(run, dtype=np.float64).ravel() for run in runs]


def _half_width(interval: tuple[float, float]) -> float:
    return float(np.sqrt(interval[1] / interval[0]) - 1.0)


def _percent(ratio: float) -> str:
    return f"{(ratio - 1.0) * 100:+.1f} %"
