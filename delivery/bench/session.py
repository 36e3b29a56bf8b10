"""What compare and noise measure: an engine in a process of its own, or a server behind a URL."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from delivery.bench.disturbance import Disturbance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from delivery.bench.url_target import UrlTarget
    from delivery.bench.worker import EngineWorker
    from delivery.bench.workload import Workload
    from delivery.gate.record import RequestRecord

BUNDLED = "deliver"


class Session(Protocol):
    """One thing to measure. `runtime` names what serves; `load_s` is None where it was running already."""

    @property
    def runtime(self) -> str: ...
    @property
    def load_s(self) -> float | None: ...
    @property
    def settings(self) -> dict[str, Any]: ...

    def run(self, workload: Workload, number: int) -> tuple[list[RequestRecord], Disturbance]:
        """One run and what disturbed it."""
        ...

    def warm_up(self, workload: Workload) -> None:
        """Run requests that are not recorded, so that no measured one pays for a cold start."""
        ...

    def probe(self, workload: Workload, in_flight: int) -> tuple[list[RequestRecord], Disturbance]:
        """A short closed loop with that many requests in flight, and what disturbed it."""
        ...

    def memory(self) -> dict[str, float] | None:
        """Bytes by part; None where they cannot be seen."""
        ...


@contextmanager
def worker_session(path: Path, device: str, options: dict[str, Any]) -> Iterator[Session]:
    """An engine loaded in a new process, ended with the block."""
    from delivery.bench.worker import EngineWorker

    with EngineWorker(path, device, **options) as worker:
        yield _WorkerSession(worker)


@contextmanager
def server_session(url: str, runtime: str = "", api_key: str | None = None) -> Iterator[Session]:
    """A running server. `runtime` overrides what its list of models says of it."""
    from delivery.bench.url_target import UrlTarget

    target = UrlTarget(url, api_key=api_key)
    target.wait_until_ready()
    yield _ServerSession(target, runtime or target.owner(), url)


@dataclass
class _WorkerSession:
    worker: EngineWorker
    runtime: str = BUNDLED

    @property
    def load_s(self) -> float:
        return self.worker.facts.load_s

    @property
    def settings(self) -> dict[str, Any]:
        return self.worker.facts.settings

    def run(self, workload: Workload, number: int) -> tuple[list[RequestRecord], Disturbance]:
        return self.worker.run(workload, number)

    def warm_up(self, workload: Workload) -> None:
        self.worker.warm_up(workload)

    def probe(self, workload: Workload, in_flight: int) -> tuple[list[RequestRecord], Disturbance]:
        return self.worker.probe(workload, in_flight)

    def memory(self) -> dict[str, float]:
        return self.worker.memory()


@dataclass
class _ServerSession:
    target: UrlTarget
    runtime: str
    url: str
    load_s: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {"url": self.url}

    # The server may be on another machine: what this one does says nothing about it.

    def run(self, workload: Workload, number: int) -> tuple[list[RequestRecord], Disturbance]:
        from delivery.bench.load import run_load

        return run_load(self.target, workload, run=number, warm=False), Disturbance()

    def warm_up(self, workload: Workload) -> None:
        from delivery.bench.load import warm_up

        warm_up(self.target, workload)

    def probe(self, workload: Workload, in_flight: int) -> tuple[list[RequestRecord], Disturbance]:
        from delivery.bench.load import run_probe

        return run_probe(self.target, workload, in_flight), Disturbance()

    def memory(self) -> None:
        return None
