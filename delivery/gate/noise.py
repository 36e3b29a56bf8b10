"""Noise: the spread between runs of the same engine, and the smallest change that can be detected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from delivery.gate.bootstrap import ratio_draws

if TYPE_CHECKING:
    from collections.abc import Sequence

WARN_OVER = 0.05
_Z_ERROR = 1.6449  # one-sided 5 %
_Z_POWER = 0.8416  # power of 80 %


@dataclass(frozen=True, slots=True)
class Noise:
    """A/A spread of one percentile.

    spread: standard deviation of the log percentile between runs (0.03 is 3 %). minimum_effect: the
    smallest slow-down (0.1 is 10 %) that a comparison of `runs` runs on either side shows to be above 1.0
    in about 80 of 100 cases.
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
    samples = [np.asarray(run, dtype=np.float64) for run in runs]
    logs = np.log([np.percentile(run, percentile) for run in samples])
    spread = float(logs.std(ddof=1))
    # An estimate varies with the spread between runs. The gate's interval is wider than that: its bootstrap
    # counts the noise inside a run a second time, so its width is measured, on the engine against itself.
    estimate = spread * np.sqrt(2.0 / len(runs))
    interval = float(ratio_draws(samples, samples, percentile=percentile, paired=False).draws.std())
    return Noise(
        percentile_ms=float(np.exp(logs.mean())),
        spread=spread,
        runs=len(runs),
        minimum_effect=float(np.expm1(_Z_ERROR * interval + _Z_POWER * estimate)),
    )
