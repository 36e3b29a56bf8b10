"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

from delivery.serving.generation import Generator, for_choices, usage
from delivery.serving.streaming import event_stream, first_item, unless_disconnected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response

    from delivery.engine.request import SamplingParams
    from delivery.serving.generation import Admission
    from delivery.serving.schema import CompletionRequest


async def complete(
    generator: Generator, model: str, request: CompletionRequest, http: Request
) -> Response | dict[str, Any]:
    """The reply: a JSON object, or a stream of chunks."""
    with generator.admitted(len(request.prompts) * request.n, request.priority) as admission:
        return await _complete(generator, model, request, http, admission)


async def _complete(
    generator: Generator, model: str, request: CompletionRequest, http: Request, admission: Admission
) -> Response | dict[str, Any]:
    tokenizer = generator.tokenizer
    # Megabytes of text take seconds; other requests go on meanwhile.
    prompts = await asyncio.to_thread(_encode, generator, request)
    runs = [
        (prompt, sampling)
        for prompt in prompts
        for sampling in for_choices(generator.sampling(request, len(prompt)), request.n)
    ]
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }
    if request.stream:
        chunks = _chunks(generator, request, runs, head, admission)
        return event_stream(await unless_disconnected(http, first_item(chunks)))
    finished = await unless_disconnected(http, generator.collect_all(runs, admission))
    choices = []
    for index, (choice, (prompt, _)) in enumerate(zip(finished, runs, strict=True)):
        text = (tokenizer.decode(prompt) if request.echo else "") + choice.text
        choices.append(
            {
                "index": index,
                "text": text,
                "finish_reason": choice.finish_reason,
                "logprobs": _logprobs(generator, choice.logprobs) if request.logprobs is not None else None,
            }
        )
    generated = sum(len(choice.token_ids) for choice in finished)
    return {**head, "choices": choices, "usage": usage(sum(map(len, prompts)), generated)}


def _encode(generator: Generator, request: CompletionRequest) -> list[list[int]]:
    return [generator.tokenizer.encode(p) if isinstance(p, str) else p for p in request.prompts]


async def _chunks(
    generator: Generator,
    request: CompletionRequest,
    runs: list[tuple[list[int], SamplingParams]],
    head: dict[str, Any],
    admission: Admission,
) -> AsyncIterator[dict[str, Any]]:
    generated = 0
    offsets = [0] * len(runs)
    async for index, output in generator.merge(runs, admission):
        generated += len(output.new_token_ids)
        logprobs = None
        if request.logprobs is not None:
            logprobs = _logprobs(generator, output.logprobs or [], offsets[index])
            offsets[index] += sum(map(len, logprobs["tokens"]))
        choice = {
            "index": index,
            "text": output.new_text,
            "finish_reason": output.finish_reason,
            "logprobs": logprobs,
        }
        yield {**head, "choices": [choice]}
    if request.include_usage:
        prompt_tokens = sum(len(prompt) for prompt, _ in runs[:: request.n])
        yield {**head, "choices": [], "usage": usage(prompt_tokens, generated)}


def _logprobs(generator: Generator, entries: list[Any], position: int = 0) -> dict[str, Any]:
    texts = [generator.tokenizer.decode([entry.token_id], skip_special_tokens=False) for entry in entries]
    offsets = []
    for text in texts:
        offsets.append(position)
        position += len(text)
    decode = generator.tokenizer.decode
    return {
        "tokens": texts,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {decode([token], skip_special_tokens=False): value for token, value in entry.top}
            for entry in entries
        ],
        "text_offset": offsets,
    }
