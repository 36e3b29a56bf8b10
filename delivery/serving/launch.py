"""Run the server: logging, the listener, and a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import logging.handlers
import signal
import socket
from typing import TYPE_CHECKING, Any

import uvicorn

from delivery.errors import DataError, EnvironmentLacking
from delivery.serving.app import Settings, State, create_app

if TYPE_CHECKING:
    from pathlib import Path

    from fastapi import FastAPI

    from delivery.checkpoint import Tokenizer

log = logging.getLogger("delivery.serving")

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_KEEP_ALIVE_S = 75
_DRAIN_POLL_S = 0.1
_LAST_WORDS_S = 2
"""How long clients may take, after the drain, to read what has been sent to them."""


def configure_logging(level: str, log_file: Path | None, max_bytes: int, files: int) -> None:
    """Log to stderr, or to a file that is rotated: never more than `max_bytes` · (`files` + 1) on disk."""
    handler: logging.Handler = logging.StreamHandler()
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            log_file, maxBytes=max_bytes, backupCount=files, encoding="utf-8"
        )
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # What uvicorn tells of its own life at INFO, our lines tell too.
    logging.getLogger("uvicorn.error").setLevel("DEBUG" if level == "debug" else "WARNING")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises EnvironmentLacking `port-in-use`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise EnvironmentLacking(
            "port-in-use",
            f"cannot listen on {host}:{port}",
            why=str(error.strerror or error),
            hint=f"--port {port + 1}",
        ) from error
    listener.listen(2048)
    return listener


def serve(settings: Settings, tokenizer: Tokenizer, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; then drain: not ready any more, running requests finish, and those that
    have not by the end of the drain timeout end with an error.

    Raises the DeliverError that kept the engine from loading.
    """
    app = create_app(settings, tokenizer)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=logging.getLogger().isEnabledFor(logging.DEBUG),
        timeout_keep_alive=_KEEP_ALIVE_S,
        server_header=False,
    )
    try:
        asyncio.run(_serve(uvicorn.Server(config), app, settings, listener))
    except SystemExit as error:  # uvicorn's own; its status would read as one of ours
        raise DataError(
            "engine-failed",
            "the server could not start",
            why="an unexpected error",
            hint="see the log above",
        ) from error


async def _serve(server: Any, app: FastAPI, settings: Settings, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    # Ours replace uvicorn's handlers: those would close the listener before load balancers look away.
    server.capture_signals = contextlib.nullcontext
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(_DRAIN_POLL_S / 10)
    state: State = app.state.server
    watch = asyncio.create_task(_until_failure(state, stop))
    await stop.wait()
    state.draining = True
    if state.engine.ready is not None:
        log.info("draining: %d requests in flight", state.engine.in_flight)
    deadline = loop.time() + settings.drain_timeout_s
    while state.engine.in_flight and state.engine.failure is None and loop.time() < deadline:
        await asyncio.sleep(_DRAIN_POLL_S)
    watch.cancel()
    if state.engine.in_flight and state.engine.failure is None:
        log.warning("%d requests ended at the drain timeout", state.engine.in_flight)
        state.engine.end_streams(_cut_short(settings.drain_timeout_s))
    server.config.timeout_graceful_shutdown = _LAST_WORDS_S
    server.should_exit = True
    await serving
    if state.engine.failure is not None:
        raise state.engine.failure


def _cut_short(drain_timeout_s: float) -> EnvironmentLacking:
    return EnvironmentLacking(
        "server-stopped",
        "the server is shutting down",
        why=f"the request did not end within {drain_timeout_s:g} s",
        hint="--drain-timeout SECONDS",
    )


async def _until_failure(state: State, stop: asyncio.Event) -> None:
    # A dead engine ends the server, so that whatever supervises it starts a fresh one.
    while state.engine.failure is None:
        await asyncio.sleep(0.5)
    stop.set()
