"""An engine in this process as a target: arrivals are handed over between its steps.

A request that comes due while a step runs waits for the next one, exactly as it would in the queue of a
server whose sender is never late, so its sending time is its scheduled time. No second thread competes
with the engine for the interpreter.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from delivery.bench.load import Progress
from delivery.bench.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from delivery.bench.plan import LoadPlan, PlannedRequest
    from delivery.gate.record import RequestRecord


class EngineTarget:
    """Drives an `EngineCore` (or anything with its `add_request`, `step`, `has_unfinished`)."""

    def __init__(
        self,
        core: Any,
        vocab_size: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._core = core
        self._vocab_size = vocab_size
        self._clock = clock
        self._sleep = sleep

    def run(self, load: LoadPlan, progress: Callable[[Progress], None] | None = None) -> list[RequestRecord]:
        """Step the engine until every request of the plan has ended. Token ids are the plan's numbers."""
        waiting = deque(load.requests)
        recorders: dict[str, Recorder] = {}
        active: set[str] = set()
        start = self._clock()
        while waiting or active:
            now = self._clock() - start
            while waiting and self._due(waiting[0], now, load, len(active)):
                request = waiting.popleft()
                due = now if request.due_s is None else request.due_s
                recorders[request.id] = self._send(request, due)
                if recorders[request.id].error is None:
                    active.add(request.id)
            if not active:
                if waiting:
                    self._sleep(max(0.0, (waiting[0].due_s or 0.0) - (self._clock() - start)))
                continue
            outputs = self._core.step()
            now = self._clock() - start
            for output in outputs:
                self._take(output, recorders, active, now)
                if output.request_id not in active and progress:
                    done = len(recorders) - len(active)
                    failed = sum(r.error is not None for r in recorders.values())
                    progress(Progress(done, len(load.requests), failed, now))
        return [recorders[r.id].record() for r in load.requests]

    @staticmethod
    def _due(request: PlannedRequest, now: float, load: LoadPlan, active: int) -> bool:
        return active < load.concurrency if request.due_s is None else request.due_s <= now

    def _send(self, request: PlannedRequest, due_s: float) -> Recorder:
        from delivery.engine.request import Request, SamplingParams
        from delivery.errors import DeliverError

        recorder = Recorder(request.id, due_s, sent_s=due_s, prompt_tokens=request.prompt_tokens)
        sampling = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True)
        try:
            self._core.add_request(Request(request.id, request.token_ids(self._vocab_size), sampling))
        except DeliverError as error:
            recorder.error = error.what
        return recorder

    @staticmethod
    def _take(output: Any, recorders: dict[str, Recorder], active: set[str], now_s: float) -> None:
        recorder = recorders[output.request_id]
        if output.new_token_ids:
            recorder.chunk(now_s, len(output.new_token_ids))
        if output.finish_reason is not None:
            recorder.finish_reason = output.finish_reason
            if output.finish_reason == "abort":
                recorder.error = "the engine aborted the request"
            active.discard(output.request_id)
