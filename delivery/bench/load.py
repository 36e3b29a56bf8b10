"""`run_load`: drives one workload against one target and returns a record per request."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from delivery.bench.plan import plan, probe_plan, warmup_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delivery.bench.plan import LoadPlan
    from delivery.bench.workload import Workload
    from delivery.gate.record import RequestRecord


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is; sent after every request that ended."""

    done: int
    total: int
    failed: int
    elapsed_s: float


class Target(Protocol):
    """A load target: an engine in this process, or a URL."""

    def run(self, load: LoadPlan, progress: Callable[[Progress], None] | None = None) -> list[RequestRecord]:
        """Send every request of the plan when it is due; records come in the plan's order."""
        ...


def run_load(
    target: Target,
    workload: Workload,
    *,
    run: int = 0,
    warm: bool = True,
    progress: Callable[[Progress], None] | None = None,
) -> list[RequestRecord]:
    """Warm up (when `warm`), then measure run number `run` of the workload.

    Garbage collection is off meanwhile: its pauses would count as the target's latency.
    """
    if warm:
        warm_up(target, workload)
    with _no_garbage_collection():
        return target.run(plan(workload, run), progress)


def run_probe(target: Target, workload: Workload, in_flight: int) -> list[RequestRecord]:
    """A short closed loop of the workload's requests, to see how many a second can be sustained."""
    with _no_garbage_collection():
        return target.run(probe_plan(workload, in_flight))


def warm_up(target: Target, workload: Workload) -> None:
    """Ask the workload's first requests with tokens of their own, so that no measured one pays a start."""
    if workload.warmup:
        target.run(warmup_plan(workload))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
