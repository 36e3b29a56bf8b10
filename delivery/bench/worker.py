"""An engine in a process of its own: clean memory numbers, and two engines side by side for pairs.

The parent sends plans and gets records back; both are plain data. An error of the engine reaches the
parent as itself.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivery.errors import DataError, DeliverError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

    from delivery.bench.disturbance import Disturbance
    from delivery.bench.workload import Workload
    from delivery.gate.record import RequestRecord

_END_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a worker tells of its engine: seconds to load it, its device, settings worth showing."""

    load_s: float
    device: str
    settings: dict[str, Any]


class EngineWorker:
    """Loads `path` in a new process. Use as a context manager, or call `close`.

    options: those of `EngineOptions`. Raises whatever loading raises.
    """

    def __init__(self, path: Path, device: str, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(path), device, options), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.facts: EngineFacts = self._answer()
        except BaseException:
            self.close()
            raise

    def run(self, workload: Workload, run: int) -> tuple[list[RequestRecord], Disturbance]:
        """One run of a workload, and what disturbed it."""
        records, disturbance = self._ask("run", workload, run)
        return records, disturbance

    def warm_up(self, workload: Workload) -> None:
        """The workload's first requests, unrecorded."""
        self._ask("warm_up", workload)

    def probe(self, workload: Workload, in_flight: int) -> tuple[list[RequestRecord], Disturbance]:
        """A short closed loop of a workload, and what disturbed it."""
        records, disturbance = self._ask("probe", workload, in_flight)
        return records, disturbance

    def memory(self) -> dict[str, float]:
        """`MemoryWatch.breakdown` since the engine was loaded."""
        found: dict[str, float] = self._ask("memory")
        return found

    def close(self) -> None:
        """End the process: asked to exit first, then killed."""
        try:
            self._pipe.send(("close",))
        except OSError:
            pass  # it is gone already
        self._process.join(_END_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def __enter__(self) -> EngineWorker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, *command: Any) -> Any:
        try:
            self._pipe.send(command)
        except OSError as error:
            raise self._died() from error
        return self._answer()

    def _answer(self) -> Any:
        try:
            good, value = self._pipe.recv()
        except EOFError as error:
            raise self._died() from error
        if good:
            return value
        raise value

    def _died(self) -> DataError:
        self._process.join(_END_TIMEOUT_S)
        return DataError(
            "engine-worker-died",
            "the process of the measured engine died",
            why=f"exit code {self._process.exitcode}",
            hint="dmesg | tail shows whether memory ran out",
        )


def _serve(pipe: Connection, path: str, device: str, options: dict[str, Any]) -> None:
    """The child's whole life."""
    try:
        started = time.perf_counter()
        engine = _Measured(path, device, options)
        pipe.send((True, engine.facts(time.perf_counter() - started)))
        while (command := pipe.recv())[0] != "close":
            pipe.send((True, getattr(engine, command[0])(*command[1:])))
        engine.core.close()
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the parent is gone, or ends us
    except DeliverError as error:
        pipe.send((False, error))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        pipe.send((False, RuntimeError(f"in the engine's process:\n{text}")))


class _Measured:
    def __init__(self, path: str, device: str, options: dict[str, Any]) -> None:
        from delivery.bench.disturbance import DisturbanceWatch
        from delivery.bench.engine_target import EngineTarget
        from delivery.bench.memory import MemoryWatch
        from delivery.bench.plan import first_use
        from delivery.engine.core import EngineCore

        foreign = DisturbanceWatch(device).stop().foreign_device_ratio
        self.core = EngineCore(path, device=device, **options)
        self._foreign_device = foreign
        self._target = EngineTarget(self.core, self.core.config.vocab_size)
        self._target.run(first_use())
        self._memory = MemoryWatch(self.core.device)

    def facts(self, load_s: float) -> EngineFacts:
        from dataclasses import asdict

        return EngineFacts(load_s, self.core.device, asdict(self.core.options))

    def run(self, workload: Workload, run: int) -> tuple[list[RequestRecord], Disturbance]:
        from delivery.bench.load import run_load

        return self._watched(lambda: run_load(self._target, workload, run=run, warm=False))

    def warm_up(self, workload: Workload) -> None:
        from delivery.bench.load import warm_up

        warm_up(self._target, workload)

    def probe(self, workload: Workload, in_flight: int) -> tuple[list[RequestRecord], Disturbance]:
        from delivery.bench.load import run_probe

        return self._watched(lambda: run_probe(self._target, workload, in_flight))

    def _watched(self, load: Callable[[], list[RequestRecord]]) -> tuple[list[RequestRecord], Disturbance]:
        from dataclasses import replace

        from delivery.bench.disturbance import DisturbanceWatch

        watch = DisturbanceWatch()
        records = load()
        return records, replace(watch.stop(), foreign_device_ratio=self._foreign_device)

    def memory(self) -> dict[str, float]:
        return self._memory.breakdown(self.core.stats())
