"""Noise: the spread between runs of the same engine, and the smallest change that can be detected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

WARN_OVER = 0.05
_Z_ERROR = 1.6449  # one-sided 5 %
_Z_POWER = 0.8416  # power of 80 %


@dataclass(frozen=True, slots=True)
class Noise:
    """A/A spread of one percentile.

    spread: standard deviation of the log percentile between runs (0.03 is 3 %). minimum_effect: the
    smallest slow-down that a comparison of `runs` pairs shows to be above 1.0 in 80 of 100 cases.
    """

    percentile_ms: float
    spread: float
    runs: int
    minimum_effect: float

    @property
    def noisy(self) -> bool:
        return self.spread > WARN_OVER


def measure(runs: Sequence[Sequence[float]], percentile: float = 95.0) -> Noise:
    """Spread over at least two runs of positive samples in ms. Raises ValueError for fewer."""
    if len(runs) < 2:
        raise ValueError(f"noise needs at least two runs, got {len(runs)}")
    logs = np.log([np.percentile(np.asarray(run, dtype=np.float64), percentile) for run in runs])
    spread = float(logs.std(ddof=1))
    error = spread * np.sqrt(2.0 / len(runs))
    return Noise(
        percentile_ms=float(np.exp(logs.mean())),
        spread=spread,
        runs=len(runs),
        minimum_effect=float(np.expm1((_Z_ERROR + _Z_POWER) * error)),
    )
