"""How often the latency gate is wrong: false alarms and detections by change, noise and budget.

Simulated requests are log-normal (sigma 0.3); every run, of the baseline and of the candidate, is
multiplied by its own log-normal run noise. Each replicate goes through `compare_latency` itself.

    python benchmarks/gate_power.py                     the grid, 1,000 replicates a cell
    python benchmarks/gate_power.py --coverage          what the 90 % interval really covers
    python benchmarks/gate_power.py --conditions        other machines: drift, long tails, slow runs
    python benchmarks/gate_power.py --json              the same as one JSON object
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from delivery.gate.latency import LIMIT, compare_latency
from delivery.gate.looks import LOOKS, ONLY, looks

SIGMA = 0.3
CHANGES = (1.0, 1.10, 1.20, 1.25)
NOISES = (0.0, 0.02, 0.05)
RESAMPLES = 2000


@dataclass(frozen=True)
class Budget:
    """`plan` is the number of runs at each look; one run is judged by the naive rule (ratio alone)."""

    name: str
    plan: tuple[int, ...]
    requests: int


BUDGETS = (
    Budget("1 run x 50, naive rule", (1,), 50),
    Budget("5 runs x 130", (5,), 130),
    Budget("5 runs x 200", (5,), 200),
    Budget("5 runs x 500", (5,), 500),
    Budget("5/8/12 pairs x 130", LOOKS, 130),
    Budget("5/8/12 pairs x 200", LOOKS, 200),
)


@dataclass(frozen=True)
class Cell:
    """Shares of replicates per outcome, and the pairs that were spent on average."""

    budget: str
    noise: float
    change: float
    failed: float
    passed: float
    inconclusive: float
    pairs: float


def requests(rng: np.random.Generator, change: float, noise: float, size: int) -> NDArray[np.float64]:
    """One run of latencies, sorted: the gate then draws the two sides apart, as they were made."""
    run = rng.normal(0.0, noise) if noise else 0.0
    return np.sort(np.exp(rng.normal(3.0, SIGMA, size) + run) * change)


def replicate(rng: np.random.Generator, budget: Budget, change: float, noise: float) -> tuple[str, int]:
    """One simulated comparison: its outcome and the pairs that it took."""
    base: list[NDArray[np.float64]] = []
    cand: list[NDArray[np.float64]] = []
    for look in looks(budget.plan) if len(budget.plan) > 1 else (ONLY,):
        for _ in range((look.pairs or budget.plan[0]) - len(base)):
            base.append(requests(rng, 1.0, noise, budget.requests))
            cand.append(requests(rng, change, noise, budget.requests))
        if budget.plan == (1,):
            ratio = np.percentile(cand[0], 95) / np.percentile(base[0], 95)
            return ("fail" if ratio > LIMIT else "pass"), 1
        verdict = compare_latency(base, cand, resamples=RESAMPLES, look=look)
        if not verdict.undecided:
            break
    return verdict.status.value, len(base)


def cell(budget: Budget, noise: float, change: float, replicates: int, seed: int) -> Cell:
    rng = np.random.default_rng(seed)
    outcomes = [replicate(rng, budget, change, noise) for _ in range(replicates)]
    count = Counter(outcome for outcome, _ in outcomes)
    return Cell(
        budget=budget.name,
        noise=noise,
        change=change,
        failed=count["fail"] / replicates,
        passed=count["pass"] / replicates,
        inconclusive=count["inconclusive"] / replicates,
        pairs=float(np.mean([pairs for _, pairs in outcomes])),
    )


def grid(replicates: int, seed: int = 1) -> list[Cell]:
    cells = []
    for number, (budget, noise, change) in enumerate(product(BUDGETS, NOISES, CHANGES)):
        cells.append(cell(budget, noise, change, replicates, seed + number))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return cells


def coverage(replicates: int, seed: int = 1) -> list[dict[str, float]]:
    """How often the truth lies below and above the 90 % interval, in shares of replicates."""
    rows = []
    for runs, size, noise in product((5, 8, 12), (130, 200, 500), NOISES):
        rng = np.random.default_rng([seed, runs, size, round(noise * 100)])
        below = above = 0
        for _ in range(replicates):
            base = [requests(rng, 1.0, noise, size) for _ in range(runs)]
            cand = [requests(rng, 1.0, noise, size) for _ in range(runs)]
            low, high = compare_latency(base, cand, resamples=RESAMPLES).interval
            below += low > 1.0
            above += high < 1.0
        row = {"runs": runs, "requests": size, "noise": noise}
        rows.append(row | {"missed_low": below / replicates, "missed_high": above / replicates})
    return rows


def conditions(replicates: int, seed: int = 1) -> list[dict[str, float | str]]:
    """Shares of failures and of inconclusive comparisons, 200 requests per run, by what the machine does."""
    rows: list[dict[str, float | str]] = []
    for condition, paired, change in product(CONDITIONS, (False, True), (1.0, 1.20)):
        count: Counter[str] = Counter()
        for number in range(replicates):
            rng = np.random.default_rng([seed, number])
            count[_disturbed(rng, condition, change, paired=paired)] += 1
        row: dict[str, float | str] = {"condition": condition, "mode": "pairs" if paired else "stored"}
        shares = {name: count[name] / replicates for name in ("fail", "inconclusive")}
        rows.append(row | {"change": change} | shares)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


CONDITIONS = {
    "5 % noise between runs": lambda rng: lambda n: rng.normal(0, SIGMA, n) + rng.normal(0, 0.05),
    "10 % noise between runs": lambda rng: lambda n: rng.normal(0, SIGMA, n) + rng.normal(0, 0.10),
    "requests of a run alike (rho 0.9)": lambda rng: lambda n: _alike(rng, n, 0.9),
    "long tail (Pareto, alpha 2.5)": lambda rng: lambda n: np.log1p(rng.pareto(2.5, n)),
    "one run in ten at half the speed": lambda rng: (
        lambda n: rng.normal(0, SIGMA, n) + (np.log(2) if rng.random() < 0.1 else 0.0)
    ),
    "drift of 2 % a run": lambda rng: _Drift(rng, lambda _: 0.02),
    "random walk of 5 % a run": lambda rng: _Drift(rng, lambda draw: draw.normal(0, 0.05)),
}
"""What a machine does, apart from the engine: a session of it → a run's logarithms of latencies."""


class _Drift:
    """A machine that gets slower or faster from run to run, in a direction of the session's own."""

    def __init__(self, rng: np.random.Generator, step: Callable[[np.random.Generator], float]) -> None:
        self.rng, self.step, self.sign, self.level = rng, step, rng.choice([-1, 1]), 0.0

    def __call__(self, size: int) -> NDArray[np.float64]:
        self.level += self.sign * self.step(self.rng)
        return np.asarray(self.rng.normal(self.level, SIGMA, size))


def _alike(rng: np.random.Generator, size: int, rho: float) -> NDArray[np.float64]:
    """Requests whose logarithms are autocorrelated: a slow one comes after a slow one."""
    own, shared = rng.normal(0, 0.2, size), np.empty(size)
    shared[0] = rng.normal(0, 0.2)
    for i, noise in enumerate(rng.normal(0, 0.2 * np.sqrt(1 - rho**2), size - 1), 1):
        shared[i] = rho * shared[i - 1] + noise
    return np.asarray(own + shared)


def _disturbed(rng: np.random.Generator, condition: str, change: float, *, paired: bool) -> str:
    """The outcome of one comparison. Stored runs are of another session than the candidate's."""

    def run(machine: Callable[[int], NDArray[np.float64]], factor: float) -> NDArray[np.float64]:
        return np.sort(np.exp(3.0 + machine(200)) * factor)

    first = CONDITIONS[condition](rng)
    if not paired:
        base = [run(first, 1.0) for _ in range(5)]
        later = CONDITIONS[condition](rng)
        cand = [run(later, change) for _ in range(5)]
        return compare_latency(base, cand, paired=False, resamples=RESAMPLES).status.value
    base, cand = [], []
    for look in looks():
        while len(base) < look.pairs:
            for side, factor in ((base, 1.0), (cand, change))[:: 1 if len(base) % 2 == 0 else -1]:
                side.append(run(first, factor))
        verdict = compare_latency(base, cand, resamples=RESAMPLES, look=look)
        if not verdict.undecided:
            break
    return verdict.status.value


def show(cells: list[Cell]) -> None:
    """One row per budget and noise: failures out of 100, with the inconclusive ones in brackets."""
    heads = "".join(f"{(c - 1) * 100:+.0f} %".rjust(16) for c in CHANGES)
    print(f"failures of 100 (inconclusive), P95, limit +15 %\n{'budget':<24}{'noise':>6}{heads}{'pairs':>8}")
    for budget, noise in product(BUDGETS, NOISES):
        row = [c for c in cells if c.budget == budget.name and c.noise == noise]
        marks = "".join(f"{c.failed * 100:.1f} ({c.inconclusive * 100:.1f})".rjust(16) for c in row)
        pairs = f"{row[0].pairs:.1f}" if row else ""
        print(f"{budget.name:<24}{noise * 100:>4.0f} %{marks}{pairs:>8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicates", type=int, default=1000)
    parser.add_argument("--coverage", action="store_true", help="check the interval instead of the rule")
    parser.add_argument("--conditions", action="store_true", help="other machines than the simulated one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.coverage or options.conditions:
        rows = (coverage if options.coverage else conditions)(options.replicates)
        print(json.dumps(rows, indent=1))
        return
    cells = grid(options.replicates)
    if options.json:
        print(json.dumps([asdict(c) for c in cells], indent=1))
    else:
        show(cells)


if __name__ == "__main__":
    main()
