"""The coarse alarm of smoke: ten timings against the baseline's ten.

Ten runs are far too few for a verdict on a P95, so it rings only when P50 and P95 both exceed the limit
and the P50's ratio is surely above 1.0. `compare` gives the binding verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from delivery.gate.looks import ERROR

if TYPE_CHECKING:
    from collections.abc import Sequence

_RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Alarm:
    """Ratios of candidate / baseline; `interval` is the 90 % interval of the P50's ratio."""

    rings: bool
    p50_ratio: float
    p95_ratio: float
    interval: tuple[float, float]


def coarse_alarm(
    baseline_ms: Sequence[float], candidate_ms: Sequence[float], limit: float = 1.15, seed: int = 0
) -> Alarm:
    """Judge two small sets of positive timings in ms. Raises ValueError when one is empty or not positive."""
    base, cand = (np.asarray(side, dtype=np.float64) for side in (baseline_ms, candidate_ms))
    for side in (base, cand):
        if side.size == 0 or not np.all(np.isfinite(side) & (side > 0)):
            raise ValueError("timings are positive numbers of ms")
    p50, p95 = (float(np.percentile(cand, p) / np.percentile(base, p)) for p in (50, 95))
    rng = np.random.default_rng(seed)
    medians = [
        np.median(side[rng.integers(0, side.size, (_RESAMPLES, side.size))], axis=1) for side in (base, cand)
    ]
    low, high = np.quantile(medians[1] / medians[0], [ERROR, 1 - ERROR])
    rings = p50 > limit and p95 > limit and float(low) > 1.0
    return Alarm(rings, p50, p95, (float(low), float(high)))
