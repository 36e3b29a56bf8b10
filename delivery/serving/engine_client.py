"""The server's end of the engine process: start it, stream requests through it, notice its death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import threading
from typing import TYPE_CHECKING, Any

from delivery.errors import DataError, DeliverError
from delivery.serving.engine_process import run_engine
from delivery.serving.messages import Abort, Failed, Outputs, Ready, Refused, Stop, Submit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from delivery.engine.outputs import EngineStats, RequestOutput
    from delivery.engine.request import SamplingParams
    from delivery.serving.messages import FromEngine

log = logging.getLogger("delivery.serving")

_STOP_TIMEOUT_S = 10.0


class EngineClient:
    """One engine process. Made and used on one event loop; `stats` is what the last step reported."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path = path
        self.options = options
        self.ready: Ready | None = None
        self.stats: EngineStats | None = None
        self.reserved = 0
        self.failure: DeliverError | None = None
        self.on_step: Callable[[Outputs], None] = lambda _outputs: None
        self._streams: dict[str, asyncio.Queue[RequestOutput | DeliverError]] = {}
        self._closing = False
        self._loaded = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        arguments = (child, str(path), options, logging.getLogger().level)
        self._process = context.Process(target=run_engine, args=arguments, name="deliver-engine", daemon=True)
        self._process.start()
        child.close()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the engine is loaded and its process runs."""
        return self.ready is not None and self.failure is None

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    def waiting_after(self, count: int) -> int:
        """How many requests would wait for a place in the batch if `count` more came now.

        The engine's last report is a step old, and of a burst it knows nothing yet: requests that it does
        not count are those reserved or sent since. They take the free places first.
        """
        if self.stats is None:
            return self.reserved + self.in_flight + count
        reported = self.stats.running + self.stats.waiting
        unreported = max(0, self.reserved + self.in_flight - reported)
        free = max(0, self.stats.max_num_seqs - reported)
        return self.stats.waiting + max(0, unreported + count - free)

    async def wait_loaded(self) -> Ready:
        """Wait until the engine is loaded; raises what kept it from loading."""
        await self._loaded.wait()
        if self.failure is not None:
            raise self.failure
        assert self.ready is not None
        return self.ready

    async def stream(
        self, request_id: str, prompt: list[int], sampling: SamplingParams, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request until it finishes; leaving early aborts it. Raises DeliverError."""
        if self.failure is not None:
            raise self.failure
        arrivals: asyncio.Queue[RequestOutput | DeliverError] = asyncio.Queue()
        self._streams[request_id] = arrivals
        finished = False
        try:
            self._send(Submit(request_id, tuple(prompt), sampling, priority))
            while not finished:
                item = await arrivals.get()
                if isinstance(item, DeliverError):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            self._streams.pop(request_id, None)
            if not finished and self.failure is None:
                self._send(Abort(request_id))

    def end_streams(self, error: DeliverError) -> None:
        """End every request with an error; the engine is not told."""
        for request_id in list(self._streams):
            self._deliver(request_id, error)

    async def close(self) -> None:
        """End the process: asked first, then by force."""
        self._closing = True
        with contextlib.suppress(OSError, ValueError):
            self._connection.send(Stop())
        await asyncio.to_thread(self._process.join, _STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)

    def _send(self, message: Submit | Abort) -> None:
        try:
            self._connection.send(message)
        except (OSError, ValueError):
            self._take(Failed(_died(self._process.exitcode)))

    def _read(self) -> None:
        while True:
            try:
                message: FromEngine = self._connection.recv()
            except (EOFError, OSError):
                self._process.join(1.0)
                message = Failed(_died(self._process.exitcode))
            with contextlib.suppress(RuntimeError):  # the loop is closed at shutdown
                self._loop.call_soon_threadsafe(self._take, message)
            if isinstance(message, Failed):
                return

    def _take(self, message: FromEngine) -> None:
        match message:
            case Ready():
                self.ready, self.stats = message, message.stats
                self._loaded.set()
            case Outputs():
                self.stats = message.stats
                self.on_step(message)
                for output in message.outputs:
                    self._deliver(output.request_id, output)
            case Refused():
                self._deliver(message.request_id, message.error)
            case Failed() if not self._closing:
                self.failure = self.failure or message.error
                self._loaded.set()
                self.end_streams(self.failure)

    def _deliver(self, request_id: str, item: RequestOutput | DeliverError) -> None:
        if arrivals := self._streams.get(request_id):
            arrivals.put_nowait(item)


def _died(exit_code: int | None) -> DeliverError:
    return DataError(
        "engine-died",
        "the engine process ended",
        why=f"its exit code is {exit_code}" + (" (killed: out of memory?)" if exit_code == -9 else ""),
        hint="see the log above; start the server again",
    )
