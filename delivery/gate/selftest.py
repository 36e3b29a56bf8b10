"""Self-test: known changes injected into a copy of the baseline's own samples must each flip the verdict.

A gate that lets an injected regression pass is broken, whatever it says about the candidate. The copy makes
the true ratio exact, so no noise can excuse a wrong answer. The classic fault is a metric whose
direction is reversed: a slow-down is then reported as an improvement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from delivery.gate.family import FamilyVerdict, compare_runs
from delivery.gate.latency import LIMIT
from delivery.gate.limits import judge as judge_limit
from delivery.gate.memory import GATED, MemoryVerdict, compare_memory
from delivery.gate.memory import LIMIT as MEMORY_LIMIT
from delivery.gate.metrics import DEFAULT_FAMILY, METRICS, definition, latency_kind, sample
from delivery.gate.report import Verdict
from delivery.gate.validity import ValidityLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from delivery.gate.record import RequestRecord

    Runs = Sequence[Sequence[RequestRecord]]

SLOWER = 1.20
MEMORY_STEP = 0.12
REVERSED = 2.5


@dataclass(frozen=True, slots=True)
class Case:
    """One injected change, with the expected and the actual verdict."""

    name: str
    expected: Verdict
    got: Verdict

    @property
    def passed(self) -> bool:
        return self.expected is self.got


def self_test(
    runs: Runs,
    memory: Mapping[str, float],
    *,
    metrics: Sequence[str] = DEFAULT_FAMILY,
    limit: float = LIMIT,
    memory_limit: float = MEMORY_LIMIT,
    valid: ValidityLimits | None = None,
    compare: Callable[..., FamilyVerdict] = compare_runs,
    compare_mem: Callable[..., MemoryVerdict] = compare_memory,
) -> tuple[Case, ...]:
    """Run every case on the baseline's `runs` and `memory`; a wider limit widens what is planted.

    A baseline without any memory, such as one of results from a URL, has no memory to change.
    """
    cases = list(_latency_cases(runs, metrics, limit, valid or ValidityLimits(), compare))
    cases += _memory_cases(memory, memory_limit, compare_mem)
    cases += _limit_cases()
    return tuple(cases)


def slowed(runs: Runs, factor: float) -> list[list[RequestRecord]]:
    """A copy in which every answer comes `factor` times as long after its scheduled arrival."""

    def stretch(record: RequestRecord, time_s: float) -> float:
        return record.scheduled_s + (time_s - record.scheduled_s) * factor

    return [
        [
            replace(
                r,
                first_token_s=None if r.first_token_s is None else stretch(r, r.first_token_s),
                last_token_s=None if r.last_token_s is None else stretch(r, r.last_token_s),
                token_times_s=tuple(stretch(r, t) for t in r.token_times_s),
            )
            for r in run
        ]
        for run in runs
    ]


def _latency_cases(
    runs: Runs,
    metrics: Sequence[str],
    limit: float,
    valid: ValidityLimits,
    compare: Callable[..., FamilyVerdict],
) -> Iterator[Case]:
    step = max(SLOWER, limit + 0.05)
    changes = (
        ("no change", 1.0, Verdict.PASS),
        (f"{step - 1:+.0%} latency", step, Verdict.FAIL),
        (f"{REVERSED:g} times slower", REVERSED, Verdict.FAIL),
        (f"{REVERSED:g} times faster", 1.0 / REVERSED, Verdict.PASS),
    )
    for metric in metrics:
        floor_ms = _reachable_floor(runs, metric, step)
        for title, factor, expected in changes:
            verdict = compare(
                runs,
                slowed(runs, factor),
                metrics=[metric],
                limit=limit,
                floors_ms={metric: floor_ms},
                paired=True,
                valid=valid,
            )
            yield Case(f"{metric}: {title}", expected, verdict.status)


def _reachable_floor(runs: Runs, metric: str, step: float) -> float:
    """The metric's floor, or less where the planted change itself would stay under it."""
    kind = latency_kind(metric)[0]
    fastest = min((v for run in runs for r in run if (v := sample(r, kind)) is not None), default=0.0)
    return min(definition(metric).floor, 0.5 * (step - 1.0) * fastest)


def _memory_cases(
    memory: Mapping[str, float], limit: float, compare_mem: Callable[..., MemoryVerdict]
) -> Iterator[Case]:
    step = max(MEMORY_STEP, limit + 0.02)
    for part in GATED if memory else ():
        for change, expected in ((0.0, Verdict.PASS), (step, Verdict.FAIL), (-step, Verdict.FAIL)):
            planted = {**memory, part: memory.get(part, 0.0) * (1.0 + change)}
            yield Case(f"{part}: {change:+.0%}", expected, compare_mem(memory, planted, limit).status)


def _limit_cases() -> Iterator[Case]:
    """Every metric with one good side: beyond its bound it fails on the bad side and not on the good."""
    for about in METRICS.values():
        if about.direction == "both":
            continue
        good, bad = (2.0, 0.5) if about.name in MORE_IS_BETTER else (0.5, 2.0)
        for title, value, expected in (("better", good, Verdict.PASS), ("worse", bad, Verdict.FAIL)):
            got = judge_limit(about.name, value, {about.name: 1.0}).status
            yield Case(f"{about.name}: {title} than its limit", expected, Verdict(got))


MORE_IS_BETTER = frozenset(
    {
        "request_throughput",
        "request_capacity",
        "output_throughput",
        "request_goodput",
        "top1_agreement_ratio",
        "top1_early_ratio",
        "top1_late_ratio",
        "bleu4_ratio",
        "accuracy_ratio",
        "smoke_greedy_agreement_ratio",
    }
)
"""Stated a second time and apart from `metrics.py`, so that one slip there is caught here."""
