"""Measuring one side alone, or two sides interleaved until the comparison is clear."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from delivery.bench.measured import Measured, Side
from delivery.gate.family import compare_runs
from delivery.gate.looks import looks
from delivery.gate.metrics import DEFAULT_FAMILY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delivery.bench.disturbance import Disturbance
    from delivery.bench.session import Session
    from delivery.bench.workload import Workload
    from delivery.gate.record import RequestRecord

_REPEATS = 2
"""Runs that are measured again when something else disturbed them."""


class Task(Protocol):
    """Where progress goes; see `steps.step.Task`."""

    def advance(self, amount: float = 1) -> None: ...
    def note(self, text: str) -> None: ...


class _Collected:
    """One side while it is being measured."""

    def __init__(self, session: Session, workload: Workload, task: Task) -> None:
        self._session, self._workload, self._task = session, workload, task
        self.runs: list[tuple[RequestRecord, ...]] = []
        self.disturbances: list[Disturbance] = []
        self._resident: list[float] = []
        self._repeats = _REPEATS

    def measure(self) -> None:
        """The next run; a disturbed one is done again a few times before it is kept as it is."""
        number = len(self.runs)
        while True:
            records, disturbance = self._session.run(self._workload, number, warm=not self.runs)
            reason = disturbance.why_invalid()
            if not reason or not self._repeats:
                break
            self._repeats -= 1
            self._task.note(f"run {number + 1} again: {reason}")
        self.runs.append(tuple(records))
        memory = self._session.memory()
        if memory is not None:
            self._resident.append(memory["resident_bytes"])
        self.disturbances.append(disturbance)
        self._task.advance(len(records))

    def side(self) -> Side:
        memory = self._session.memory()
        if memory is not None:
            # From the first run's end on, when caches are filled, memory has to stay where it is.
            memory["drift_ratio"] = abs(self._resident[-1] / self._resident[0] - 1.0)
        return Side(
            runs=tuple(self.runs),
            disturbances=tuple(self.disturbances),
            memory=memory,
            runtime=self._session.runtime,
            load_s=self._session.load_s,
            settings=self._session.settings,
        )


def measure_alone(session: Session, workload: Workload, runs: int, task: Task) -> Measured:
    """`runs` runs of one side, after one warm-up."""
    collected = _Collected(session, workload, task)
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
) -> Measured:
    """A B B A …: pairs until a look decides, at most as many as the last look sees.

    Run i of both sides has the same prompts, lengths and arrivals. Each side warms up once.
    """
    a, b = _Collected(baseline, workload, task), _Collected(candidate, workload, task)
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
