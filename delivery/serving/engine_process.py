"""The engine's own process: takes messages from a pipe, steps the engine, sends back what came out.

Spawned, never forked: CUDA and threads do not survive a fork.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from delivery.errors import DataError, DeliverError
from delivery.serving.messages import Abort, Failed, Outputs, Ready, Refused, Stop, Submit

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from delivery.engine.core import EngineCore
    from delivery.serving.messages import ToEngine

log = logging.getLogger("delivery.engine")

_IDLE_POLL_S = 0.5


def run_engine(connection: Connection, path: str, options: dict[str, Any], log_level: int) -> None:
    """Entry point of the engine process. Ends when told to, or when the server's end of the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        started = time.perf_counter()
        core = _load(path, options)
    except DeliverError as error:
        connection.send(Failed(error))
        return
    load_s = time.perf_counter() - started
    connection.send(Ready(load_s, core.stats(), options))
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    try:
        _loop(core, connection, inbox)
    except DeliverError as error:
        log.error("%s", error)
        connection.send(Failed(error))
    except Exception as error:
        log.exception("the engine failed")
        why = f"{type(error).__name__}: {error}"
        connection.send(Failed(DataError("engine-failed", "the engine stopped", why=why)))
    finally:
        core.close()


def _load(path: str, options: dict[str, Any]) -> EngineCore:
    from delivery.engine.core import EngineCore

    return EngineCore(path, **options)


def _receive(connection: Connection, inbox: queue.SimpleQueue[ToEngine]) -> None:
    # A thread of its own, so that neither side ever blocks on a full pipe while the other sends.
    while True:
        try:
            inbox.put(connection.recv())
        except (EOFError, OSError):
            inbox.put(Stop())
            return


def _loop(core: EngineCore, connection: Connection, inbox: queue.SimpleQueue[ToEngine]) -> None:
    while True:
        busy = core.has_unfinished()
        try:
            message = inbox.get(block=not busy, timeout=None if busy else _IDLE_POLL_S)
        except queue.Empty:
            if not busy:
                continue
        else:
            if isinstance(message, Stop):
                return
            _handle(core, connection, message)
            continue  # take all that waits before the next step
        outputs = core.step()
        connection.send(Outputs(tuple(outputs), core.stats()))


def _handle(core: EngineCore, connection: Connection, message: Submit | Abort) -> None:
    if isinstance(message, Abort):
        core.abort(message.request_id)
        connection.send(Outputs((), core.stats()))
        return
    from delivery.engine.request import Request

    try:
        core.add_request(
            Request(
                request_id=message.request_id,
                prompt_token_ids=list(message.prompt_token_ids),
                sampling=message.sampling,
                priority=message.priority,
            )
        )
    except DeliverError as error:
        connection.send(Refused(message.request_id, error))
