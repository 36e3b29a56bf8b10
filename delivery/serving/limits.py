"""Limits on what a client may send: rate by caller, size and bytes of a body."""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect

from delivery.serving.problem import CLIENT_CLOSED_REQUEST, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.requests import Request

_MAX_CALLERS = 10_000
_MAX_DEPTH = 64
_CONTROL_BYTE = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")


class RateLimiter:
    """Token bucket by caller: `per_minute` requests on average, bursts of up to as many as that in 10 s."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_minute / 60
        self._burst = max(1.0, per_minute / 6)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def admit(self, caller: str) -> float:
        """0 when the call is admitted, otherwise the seconds to wait."""
        if self._per_second <= 0:
            return 0.0
        now = self._clock()
        tokens, seen = self._buckets.pop(caller, (self._burst, now))
        tokens = min(self._burst, tokens + (now - seen) * self._per_second)
        wait_s = 0.0 if tokens >= 1 else (1 - tokens) / self._per_second
        self._buckets[caller] = (tokens - 1 if wait_s == 0 else tokens, now)
        while len(self._buckets) > _MAX_CALLERS:
            self._buckets.popitem(last=False)
        return wait_s


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The body, refused with 413 as soon as it passes the limit (declared or counted).

    Raises Problem with status 499 when the client leaves before its end.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(int(declared), limit_bytes)
    parts: list[bytes] = []
    size_bytes = 0
    try:
        async for chunk in request.stream():
            size_bytes += len(chunk)
            if size_bytes > limit_bytes:
                raise _too_large(size_bytes, limit_bytes)
            parts.append(chunk)
    except ClientDisconnect as error:
        raise Problem(CLIENT_CLOSED_REQUEST, "client_closed_request", "the client went away") from error
    return b"".join(parts)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; anything else is a 400 that says where it went wrong."""
    if found := _CONTROL_BYTE.search(body):
        message = f"control byte 0x{found.group()[0]:02x} at position {found.start()}"
        raise Problem(400, "control_byte", message)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Problem(400, "not_utf8", f"the body is not UTF-8: byte {error.start}") from error
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise Problem(400, "broken_json", "the JSON is nested too deeply") from error
    except ValueError as error:
        raise Problem(400, "broken_json", f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise Problem(400, "not_an_object", f"expected a JSON object, got {type(data).__name__}")
    if _depth(data) > _MAX_DEPTH:
        raise Problem(400, "broken_json", f"the JSON is nested deeper than {_MAX_DEPTH} levels")
    if "\\u" in text:
        _check_escapes(data)
    return data


def _check_escapes(data: dict[str, Any]) -> None:
    """Escapes can spell what raw bytes cannot: NUL, and halves of a surrogate pair."""
    for text in _texts(data):
        if "\0" in text:
            raise Problem(400, "control_byte", "a string holds the NUL character")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Problem(400, "lone_surrogate", "a string holds half of a surrogate pair") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _too_large(size_bytes: int, limit_bytes: int) -> Problem:
    return Problem(413, "body_too_large", f"the body has {size_bytes:,} bytes; the limit is {limit_bytes:,}")


def _depth(value: object) -> int:
    return max(level for _, level in _parts(value))


def _texts(value: object) -> Iterator[str]:
    """Every string in JSON data, names included."""
    for item, _ in _parts(value):
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            yield from item


def _parts(value: object) -> Iterator[tuple[object, int]]:
    """JSON data and all that is in it, with the level where it stands; the whole is at 1."""
    stack = [(value, 1)]
    while stack:
        item, level = stack.pop()
        yield item, level
        children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        stack.extend((child, level + 1) for child in children)
