"""Server-sent events of the OpenAI API, and stopping work when the client goes away."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import StreamingResponse

from delivery.serving.problem import CLIENT_CLOSED_REQUEST, Problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from starlette.requests import Request

T = TypeVar("T")

_POLL_S = 0.1


def event_stream(chunks: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """Each chunk as one event, then `[DONE]`; a problem in mid-stream is an event with `error`."""

    async def events() -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        except Problem as problem:
            yield f"data: {json.dumps(problem.to_json(), ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"

    # X-Accel-Buffering: nginx would otherwise hold tokens back.
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await the work, but cancel it (and so abort its requests) once the client is gone."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_POLL_S)
            if not task.done() and await request.is_disconnected():
                raise Problem(CLIENT_CLOSED_REQUEST, "client_closed_request", "the client went away")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def first_item(chunks: AsyncIterator[T]) -> AsyncIterator[T]:
    """Wait for the first item, so that an early problem is still an HTTP status; then replay it."""
    try:
        head = await anext(chunks)
    except StopAsyncIteration:
        return chunks

    async def replay() -> AsyncIterator[T]:
        yield head
        async for item in chunks:
            yield item

    return replay()
