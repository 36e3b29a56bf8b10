"""Executor: where a step runs. `submit` returns at once with something whose `result` may be waited for."""

from __future__ import annotations

from typing import Protocol

from delivery.engine.outputs import ModelOutput, SchedulerOutput
from delivery.engine.runner import ModelRunner


class Pending(Protocol):
    def result(self) -> ModelOutput: ...


class Executor(Protocol):
    """depth: steps that may be in flight; 2 where the device works while the host prepares the next step."""

    depth: int

    def submit(self, work: SchedulerOutput) -> Pending: ...

    def close(self) -> None: ...


class InProcess:
    """The runner in this process and on one device."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.depth = 2 if runner.device.type == "cuda" else 1

    def submit(self, work: SchedulerOutput) -> Pending:
        return self.runner.execute(work)

    def close(self) -> None:
        """Drop recorded steps, which hold device memory and refer to the runner."""
        self.runner.recorded = self.runner.mixed = None
