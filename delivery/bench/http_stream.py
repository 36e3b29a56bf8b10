"""A small HTTP/1.1 client over asyncio: keeps connections, and says when each piece of a body came.

Enough for JSON requests and event streams. `bench` runs on hosts without a client library, and the time
of arrival has to be taken as near to the socket as can be.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

_READ_BYTES = 1 << 16
_MAX_HEADER_BYTES = 1 << 16


class HttpError(Exception):
    """The server could not be reached, or did not speak HTTP."""


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = False

    def close(self) -> None:
        self.writer.close()


@dataclass
class Client:
    """Connections to one server. `base` is http(s)://host[:port][/prefix]; times are seconds."""

    base: str
    headers: Mapping[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = field(default=lambda: asyncio.get_running_loop().time())
    timeout_s: float = 600.0
    _idle: list[_Connection] = field(default_factory=list)

    async def request(
        self, method: str, path: str, body: bytes = b"", on_sent: Callable[[], None] | None = None
    ) -> tuple[int, AsyncIterator[tuple[float, bytes]]]:
        """Send a request; gives the status and the body as (arrival time, bytes) pieces.

        The pieces have to be read to the end, or the connection is dropped. Raises HttpError.
        """
        while True:
            connection = await self._connect()
            reused = connection.used
            try:
                connection.writer.write(self._head(method, path, body) + body)
                await connection.writer.drain()
                if on_sent:
                    on_sent()
                status, headers = await self._read_head(connection)
            except HttpError:
                connection.close()
                raise
            except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                connection.close()
                if reused:
                    continue  # the server had closed an idle connection
                raise HttpError(f"{type(error).__name__}: {error}") from error
            return status, self._body(connection, headers)

    async def close(self) -> None:
        """Close idle connections."""
        for connection in self._idle:
            connection.close()
            with suppress(OSError):
                await connection.writer.wait_closed()
        self._idle.clear()

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof():
                return connection
            connection.close()
        url = urlsplit(self.base)
        secure = url.scheme == "https"
        try:
            reader, writer = await asyncio.open_connection(
                url.hostname,
                url.port or (443 if secure else 80),
                ssl=ssl.create_default_context() if secure else None,
                limit=_MAX_HEADER_BYTES,
            )
        except OSError as error:
            raise HttpError(f"cannot connect to {self.base}: {error}") from error
        return _Connection(reader, writer)

    def _head(self, method: str, path: str, body: bytes) -> bytes:
        url = urlsplit(self.base)
        lines = [f"{method} {url.path.rstrip('/')}{path} HTTP/1.1", f"Host: {url.netloc.rpartition('@')[2]}"]
        lines += ["Accept: */*", f"Content-Length: {len(body)}"]
        lines += ["Content-Type: application/json"] if body else []
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    async def _read_head(self, connection: _Connection) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(self.timeout_s):
            raw = await connection.reader.readuntil(b"\r\n\r\n")
        first, *rest = raw.decode("latin-1").split("\r\n")
        parts = first.split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/") or not parts[1].isdigit():
            raise HttpError(f"not an HTTP answer: {first[:80]!r}")
        headers = {}
        for line in rest:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return int(parts[1]), headers

    async def _body(
        self, connection: _Connection, headers: dict[str, str]
    ) -> AsyncIterator[tuple[float, bytes]]:
        whole = False
        try:
            async with asyncio.timeout(self.timeout_s):
                if "chunked" in headers.get("transfer-encoding", "").lower():
                    pieces = self._chunked(connection.reader)
                elif "content-length" in headers:
                    pieces = self._sized(connection.reader, int(headers["content-length"]))
                else:
                    pieces = self._to_end(connection.reader)
                    headers["connection"] = "close"
                async for piece in pieces:
                    yield piece
            whole = True
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise HttpError(f"the answer broke off: {type(error).__name__}: {error}") from error
        finally:
            if whole and headers.get("connection", "").lower() != "close":
                connection.used = True
                self._idle.append(connection)
            else:
                connection.close()

    async def _chunked(self, reader: asyncio.StreamReader) -> AsyncIterator[tuple[float, bytes]]:
        while True:
            size = int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)
            if size == 0:
                while await reader.readuntil(b"\r\n") != b"\r\n":
                    pass  # trailers
                return
            data = await reader.readexactly(size)
            yield self.clock(), data
            await reader.readexactly(2)

    async def _sized(self, reader: asyncio.StreamReader, size: int) -> AsyncIterator[tuple[float, bytes]]:
        while size > 0:
            data = await reader.read(min(size, _READ_BYTES))
            if not data:
                raise asyncio.IncompleteReadError(b"", size)
            size -= len(data)
            yield self.clock(), data

    async def _to_end(self, reader: asyncio.StreamReader) -> AsyncIterator[tuple[float, bytes]]:
        while data := await reader.read(_READ_BYTES):
            yield self.clock(), data
