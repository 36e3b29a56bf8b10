"""A small HTTP/1.1 client over asyncio that keeps connections and timestamps each piece of a body.

Enough for JSON requests and event streams. `bench` runs on hosts without a client library, and the time
of arrival has to be taken as near to the socket as can be: when the event loop hands the bytes over, not
when a waiting task gets its turn.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_MAX_HEAD_BYTES = 1 << 16
_NO_BODY = (204, 304)

Piece = tuple[float, bytes]


class HttpError(Exception):
    """The server could not be reached, or did not speak HTTP."""


@dataclass
class _Answer:
    """What has come of an answer; `done` is set when it is whole."""

    done: asyncio.Future[None]
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    begun: bool = False
    keep: bool = True
    """Whether the connection can be used again."""


class _Wire(asyncio.Protocol):
    """One connection. Each reader takes what it can from the buffer and is False when it needs more."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buffer = b""
        self._rest = 0
        self._read: Callable[[float], bool] = self._head
        self._answer: _Answer | None = None
        self._transport: asyncio.Transport | None = None
        self.open = False
        self.used = False

    def ask(self, data: bytes) -> _Answer:
        """Send a request; the event loop fills in its answer. One request at a time."""
        assert self._transport is not None
        self._answer = _Answer(asyncio.get_running_loop().create_future())
        self._buffer, self._read = b"", self._head
        self._transport.write(data)
        return self._answer

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.close()

    # what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.open = transport, True

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        if self._answer is None:
            self.close()  # nobody asked
            return
        self._answer.begun = True
        self._buffer += data
        try:
            while self._answer is not None and self._buffer and self._read(now):
                pass
        except (ValueError, HttpError) as error:
            self._fail(f"the response was cut off: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._answer is None:
            return
        if self._read == self._to_end:
            self._finish()
        else:
            self._fail(f"the response was cut off: {exc or 'the server closed the connection'}")

    # readers

    def _head(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise HttpError("its head is too long")
            return False
        assert self._answer is not None
        raw, self._buffer = self._buffer[:end].decode("latin-1"), self._buffer[end + 4 :]
        first, *lines = raw.split("\r\n")
        parts = first.split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/") or not parts[1].isdigit():
            raise HttpError(f"not an HTTP answer: {first[:80]!r}")
        if parts[1].startswith("1"):
            return True  # an interim answer, the real one follows
        answer = self._answer
        answer.status = int(parts[1])
        named = (line.partition(":") for line in lines)
        answer.headers = {name.strip().lower(): value.strip() for name, _, value in named}
        answer.keep = answer.headers.get("connection", "").lower() != "close"
        if "chunked" in answer.headers.get("transfer-encoding", "").lower():
            self._read = self._chunk_size
        elif answer.status in _NO_BODY:
            self._finish()
        elif "content-length" in answer.headers:
            self._rest, self._read = int(answer.headers["content-length"]), self._sized
            if self._rest == 0:
                self._finish()
        else:
            answer.keep, self._read = False, self._to_end
        return True

    def _sized(self, now: float) -> bool:
        self._take(now)
        if self._rest == 0:
            self._finish()
        return False

    def _to_end(self, now: float) -> bool:
        self._rest = len(self._buffer)
        self._take(now)
        return False

    def _chunk_size(self, now: float) -> bool:
        line, found, rest = self._buffer.partition(b"\r\n")
        if not found:
            return False
        self._rest, self._buffer = int(line.partition(b";")[0], 16), rest
        self._read = self._chunk if self._rest else self._trailer
        return True

    def _chunk(self, now: float) -> bool:
        if self._rest:
            self._take(now)
        if self._rest or len(self._buffer) < 2:
            return False
        self._buffer, self._read = self._buffer[2:], self._chunk_size
        return True

    def _trailer(self, now: float) -> bool:
        line, found, rest = self._buffer.partition(b"\r\n")
        if not found:
            return False
        self._buffer = rest
        if not line:
            self._finish()
        return True

    def _take(self, now: float) -> None:
        """The part of the buffer that belongs to the body."""
        assert self._answer is not None
        data, self._buffer = self._buffer[: self._rest], self._buffer[self._rest :]
        self._rest -= len(data)
        if data:
            self._answer.pieces.append((now, data))

    def _finish(self) -> None:
        assert self._answer is not None
        answer, self._answer = self._answer, None
        if not answer.done.done():
            answer.done.set_result(None)

    def _fail(self, why: str) -> None:
        self.close()
        assert self._answer is not None
        answer, self._answer = self._answer, None
        if not answer.done.done():
            answer.done.set_exception(HttpError(why))


@dataclass
class Client:
    """Connections to one server. `base` is http(s)://host[:port][/prefix]; times are seconds."""

    base: str
    headers: Mapping[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = field(default=lambda: asyncio.get_running_loop().time())
    timeout_s: float = 600.0
    _idle: list[_Wire] = field(default_factory=list)
    _opening: set[asyncio.Task[None]] = field(default_factory=set)

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, AsyncIterator[Piece]]:
        """Send a request; returns the status and, once complete, the body as (arrival time, bytes) pieces.

        Raises HttpError.
        """
        while True:
            wire = await self._wire()
            answer = wire.ask(self._head(method, path, body) + body)
            try:
                async with asyncio.timeout(self.timeout_s):
                    await answer.done
            except TimeoutError as error:
                wire.close()
                raise HttpError(f"no whole answer within {self.timeout_s:g} s") from error
            except HttpError:
                if wire.used and not answer.begun:
                    continue  # the server had closed an idle connection
                raise
            except asyncio.CancelledError:
                wire.close()
                raise
            wire.used = True
            if answer.keep and wire.open:
                self._idle.append(wire)
            else:
                wire.close()
            return answer.status, _each(answer.pieces)

    def prepare(self) -> None:
        """Have a connection ready for the next request, so that it need not wait for one to open."""
        if not self._opening and not any(wire.open for wire in self._idle):
            task = asyncio.create_task(self._prepare())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def close(self) -> None:
        """Close idle connections."""
        for task in tuple(self._opening):
            task.cancel()
        for wire in self._idle:
            wire.close()
        self._idle.clear()
        await asyncio.sleep(0)

    async def _prepare(self) -> None:
        try:
            self._idle.append(await self._opened())
        except HttpError:
            pass  # the request itself will say so

    async def _wire(self) -> _Wire:
        while self._idle:
            wire = self._idle.pop()
            if wire.open:
                return wire
        return await self._opened()

    async def _opened(self) -> _Wire:
        url = urlsplit(self.base)
        secure = url.scheme == "https"
        try:
            _, wire = await asyncio.get_running_loop().create_connection(
                lambda: _Wire(self.clock),
                url.hostname or "",
                url.port or (443 if secure else 80),
                ssl=ssl.create_default_context() if secure else None,
            )
        except (OSError, UnicodeError) as error:  # a name such as a..b cannot be looked up
            raise HttpError(f"cannot connect to {self.base}: {error}") from error
        return wire

    def _head(self, method: str, path: str, body: bytes) -> bytes:
        url = urlsplit(self.base)
        lines = [f"{method} {url.path.rstrip('/')}{path} HTTP/1.1", f"Host: {url.netloc.rpartition('@')[2]}"]
        lines += ["Accept: */*", f"Content-Length: {len(body)}"]
        lines += ["Content-Type: application/json"] if body else []
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _each(pieces: list[Piece]) -> AsyncIterator[Piece]:
    for piece in pieces:
        yield piece
