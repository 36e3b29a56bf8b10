"""Measuring one side alone, or two sides interleaved until the comparison is clear."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from delivery.bench.disturbance import MAX_FOREIGN_RATIO
from delivery.bench.measured import Measured, Side
from delivery.bench.plan import offered_rate, probe_levels
from delivery.gate.capacity import shown, sustained_rate, why_too_fast
from delivery.gate.family import compare_runs
from delivery.gate.looks import looks
from delivery.gate.metrics import DEFAULT_FAMILY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delivery.bench.disturbance import Disturbance
    from delivery.bench.session import Session
    from delivery.bench.workload import Workload
    from delivery.gate.record import RequestRecord

    Run = tuple[list[RequestRecord], Disturbance]

_REPEATS = 2
"""Runs that are measured again when something else disturbed them."""
_FULL = 1.10
"""Twice as many requests in flight that bring less than this factor: the capacity is reached."""


class Task(Protocol):
    """Where progress goes; see `steps.step.Task`."""

    def advance(self, amount: float = 1) -> None: ...
    def note(self, text: str) -> None: ...


class _Collected:
    """One side while it is being measured. It warms up when it is made."""

    def __init__(self, session: Session, workload: Workload, task: Task, foreign_limit: float) -> None:
        self._session, self._workload, self._task = session, workload, task
        self._foreign_limit = foreign_limit
        self.runs: list[tuple[RequestRecord, ...]] = []
        self.disturbances: list[Disturbance] = []
        self.capacity: float | None = None
        self._resident: list[float] = []
        self._repeats = _REPEATS
        session.warm_up(workload)

    def probe(self) -> None:
        """Find how many requests/s can be sustained: twice as many in flight until that brings no more.

        A probe that stays disturbed says nothing.
        """
        for in_flight in probe_levels(self._workload):
            load = partial(self._session.probe, self._workload, in_flight)
            records, disturbance = self._undisturbed(f"{in_flight} in flight", load)
            rate = sustained_rate(records)
            if rate is None or disturbance.why_invalid(self._foreign_limit):
                break
            full = self.capacity is not None and rate < _FULL * self.capacity
            self.capacity = max(rate, self.capacity or 0.0)
            self._task.note(f"{in_flight} in flight: {shown(rate)} requests/s")
            if full:
                break

    def measure(self) -> None:
        """The next run; a disturbed one is done again a few times before it is kept as it is."""
        number = len(self.runs)
        load = partial(self._session.run, self._workload, number)
        records, disturbance = self._undisturbed(f"run {number + 1}", load)
        self.runs.append(tuple(records))
        memory = self._session.memory()
        if memory is not None:
            self._resident.append(memory["resident_bytes"])
        self.disturbances.append(disturbance)
        self._task.advance(len(records))

    def side(self) -> Side:
        memory = self._session.memory()
        if memory is not None and self._resident:
            # From the first run's end on, when caches are filled, memory has to stay where it is.
            memory["drift_ratio"] = abs(self._resident[-1] / self._resident[0] - 1.0)
        return Side(
            runs=tuple(self.runs),
            disturbances=tuple(self.disturbances),
            memory=memory,
            runtime=self._session.runtime,
            load_s=self._session.load_s,
            capacity=self.capacity,
            settings=self._session.settings,
        )

    def _undisturbed(self, what: str, load: Callable[[], Run]) -> Run:
        while True:
            records, disturbance = load()
            reason = disturbance.why_invalid(self._foreign_limit)
            if not reason or not self._repeats:
                return records, disturbance
            self._repeats -= 1
            self._task.note(f"{what} again: {reason}")


def measure_alone(
    session: Session,
    workload: Workload,
    runs: int,
    task: Task,
    foreign_limit: float = MAX_FOREIGN_RATIO,
) -> Measured:
    """`runs` runs of one side, after one warm-up and, for an open loop, a look at its capacity."""
    collected = _Collected(session, workload, task, foreign_limit)
    if offered_rate(workload) is not None:
        collected.probe()
    for _ in range(runs):
        collected.measure()
    return Measured(collected.side())


def measure_pairs(
    baseline: Session,
    candidate: Session,
    workload: Workload,
    limit: float,
    task: Task,
    metrics: Sequence[str] = DEFAULT_FAMILY,
    foreign_limit: float = MAX_FOREIGN_RATIO,
) -> Measured:
    """A B B A …: pairs until a look decides, at most as many as the last look sees.

    Run i of both sides has the same prompts, lengths and arrivals. Each side warms up once. Of an open
    loop that asks too much of the baseline no pair is measured: only what the baseline can sustain.
    """
    a, b = (_Collected(side, workload, task, foreign_limit) for side in (baseline, candidate))
    rate = offered_rate(workload)
    if rate is not None:
        a.probe()
        if why_too_fast(rate, a.capacity):
            return Measured(b.side(), a.side())
        b.probe()
    for look in looks():
        while len(b.runs) < look.pairs:
            first, second = (a, b) if len(b.runs) % 2 == 0 else (b, a)
            first.measure()
            second.measure()
        verdict = compare_runs(a.runs, b.runs, limit=limit, look=look, metrics=metrics)
        task.note(f"{look.pairs} pairs: {verdict.status.value}")
        if not verdict.undecided:
            break
    return Measured(b.side(), a.side())
