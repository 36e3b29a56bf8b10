"""Hierarchical bootstrap of a ratio of percentiles: runs are drawn first, then requests within a run.

The statistic is the geometric mean over runs of candidate percentile / baseline percentile. Runs are
the independent units (requests of one run share its noise), so they are resampled as a whole
(Davison & Hinkley 1997, section 3.8). Resampling the requests on top counts the noise inside a run a
second time, which offsets the narrowness of a percentile interval over few runs: with 5 to 12 runs of
130 to 500 log-normal requests and run noise of 0 to 5 % the plain 90 % interval misses the truth on
either side in 1 to 5 of 100 cases, never more (`benchmarks/gate_power.py --coverage`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

RESAMPLES = 4000
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class RatioDraws:
    """`log_ratio` is the estimate, `draws` its bootstrap replicates (float64 [resamples]).

    `baseline_ms` and `candidate_ms` are the geometric means over runs of the percentile itself.
    """

    log_ratio: float
    draws: Floats
    baseline_ms: float
    candidate_ms: float

    @property
    def ratio(self) -> float:
        return float(np.exp(self.log_ratio))

    def interval(self, error: float) -> tuple[float, float]:
        """Percentile interval of the ratio that leaves `error` out on either side."""
        low, high = np.exp(np.quantile(self.draws, [error, 1.0 - error]))
        return float(low), float(high)

    def p_not_above(self, ratio: float) -> float:
        """One-sided bootstrap p-value of "the true ratio is at most `ratio`"."""
        at_most = int(np.count_nonzero(self.draws <= np.log(ratio)))
        return (at_most + 1) / (self.draws.size + 1)


def ratio_draws(
    baseline: Sequence[Floats],
    candidate: Sequence[Floats],
    *,
    percentile: float,
    paired: bool,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> RatioDraws:
    """Estimate and bootstrap the ratio of percentiles.

    baseline, candidate: per run a float64 array [requests] of positive values in any order.
    paired: run i of both sides belongs together and is drawn together. When a pair also has equally
    many requests, request j belongs with request j (same prompt, same arrival) and both are drawn
    together, so that what they share cancels. Values that were sorted have lost that order; they are
    then drawn apart, which is never too narrow.
    """
    if paired and all(a.size == b.size for a, b in zip(baseline, candidate, strict=True)):
        together = not any(_sorted(a) and _sorted(b) for a, b in zip(baseline, candidate, strict=True))
    else:
        together = False
    base_logs = np.log([np.percentile(run, percentile) for run in baseline])
    cand_logs = np.log([np.percentile(run, percentile) for run in candidate])
    chosen = _chosen_runs(len(baseline), resamples, seed, 0)
    if together:
        draws = _draws_together(baseline, candidate, percentile, chosen, seed)
    else:
        other = chosen if paired else _chosen_runs(len(candidate), resamples, seed, 1)
        draws = _log_percentiles(candidate, percentile, other, seed, 3) - _log_percentiles(
            baseline, percentile, chosen, seed, 2
        )
    return RatioDraws(
        log_ratio=float(cand_logs.mean() - base_logs.mean()),
        draws=draws,
        baseline_ms=float(np.exp(base_logs.mean())),
        candidate_ms=float(np.exp(cand_logs.mean())),
    )


def _sorted(values: Floats) -> bool:
    return values.size > 2 and bool(np.all(values[1:] >= values[:-1])) and values[0] < values[-1]


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng([seed, stream])


@lru_cache(maxsize=32)
def _chosen_runs(runs: int, resamples: int, seed: int, stream: int) -> Ints:
    """int64 [resamples, runs]: which run fills each slot of each resample."""
    return _generator(seed, stream).integers(0, runs, size=(resamples, runs))


@lru_cache(maxsize=64)
def _order_statistics(
    requests: int, percentile: float, shape: tuple[int, int], seed: int, stream: int
) -> tuple[Ints, Ints, float]:
    """Ranks, in the sorted sample, of the two order statistics that a resample's percentile lies between.

    Exact and without resampling: the k-th smallest of n uniform draws is Beta(k, n + 1 − k), the next
    one splits what is left by Beta(1, n − k), and the resample holds sorted[⌊n·u⌋] there.
    """
    position = (requests - 1) * percentile / 100.0
    k = int(position) + 1
    rng = _generator(seed, stream)
    lower = rng.beta(k, requests + 1 - k, size=shape)
    rest = rng.beta(1, requests - k, size=shape) if k < requests else np.zeros(shape)
    upper = lower + (1.0 - lower) * rest
    last = requests - 1
    ranks = [np.minimum((u * requests).astype(np.int64), last) for u in (lower, upper)]
    return ranks[0], ranks[1], position - int(position)


def _log_percentiles(
    runs: Sequence[Floats], percentile: float, chosen: Ints, seed: int, stream: int
) -> Floats:
    """float64 [resamples]: mean log percentile of resampled runs of resampled requests."""
    shape = (chosen.shape[0], chosen.shape[1])
    values = np.empty(shape)
    sizes = {run.size for run in runs}
    ordered = [np.sort(run) for run in runs]
    for size in sorted(sizes):
        lower, upper, fraction = _order_statistics(size, percentile, shape, seed, stream)
        index = np.cumsum([run.size == size for run in runs]) - 1
        table = np.stack([run for run in ordered if run.size == size])
        slots = np.array([run.size == size for run in runs])[chosen]
        rows = index[chosen[slots]]
        low, high = table[rows, lower[slots]], table[rows, upper[slots]]
        values[slots] = low + (high - low) * fraction
    return np.asarray(np.log(values).mean(axis=1))


def _draws_together(
    baseline: Sequence[Floats], candidate: Sequence[Floats], percentile: float, chosen: Ints, seed: int
) -> Floats:
    """float64 [resamples]: mean log ratio where a pair's requests are drawn by common indices."""
    rng = _generator(seed, 4)
    total = np.zeros(chosen.shape[0])
    for slot in range(chosen.shape[1]):
        for run in np.unique(chosen[:, slot]):
            rows = np.flatnonzero(chosen[:, slot] == run)
            a, b = baseline[run], candidate[run]
            step = max(1, _CHUNK_ELEMENTS // a.size)
            for start in range(0, rows.size, step):
                part = rows[start : start + step]
                pick = rng.integers(0, a.size, size=(part.size, a.size))
                total[part] += _log_percentile_rows(b[pick], percentile)
                total[part] -= _log_percentile_rows(a[pick], percentile)
    return np.asarray(total / chosen.shape[1])


def _log_percentile_rows(values: Floats, percentile: float) -> Floats:
    """log of each row's percentile (linear interpolation, as numpy); `values` is reordered."""
    position = (values.shape[1] - 1) * percentile / 100.0
    k = int(position)
    last = min(k + 1, values.shape[1] - 1)
    values.partition((k, last), axis=1)
    low, high = values[:, k], values[:, last]
    return np.asarray(np.log(low + (high - low) * (position - k)))
