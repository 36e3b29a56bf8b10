"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivery.errors import DeliverError
from delivery.serving.generation import Choice, Generator, for_choices, head, usage
from delivery.serving.problem import Problem
from delivery.serving.streaming import event_stream, first_item, unless_disconnected
from delivery.serving.tool_calls import split_tool_calls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response

    from delivery.checkpoint import Tokenizer
    from delivery.engine.request import SamplingParams
    from delivery.serving.generation import Admission
    from delivery.serving.schema import ChatRequest


@dataclass(frozen=True, slots=True)
class _Turn:
    """One request on its way: its prompt, a SamplingParams per choice, what every chunk begins with."""

    generator: Generator
    request: ChatRequest
    prompt: list[int]
    samplings: list[SamplingParams]
    start: dict[str, Any]
    admission: Admission

    @property
    def runs(self) -> list[tuple[list[int], SamplingParams]]:
        return [(self.prompt, sampling) for sampling in self.samplings]


async def chat(
    generator: Generator, model: str, request: ChatRequest, http: Request
) -> Response | dict[str, Any]:
    """The reply: a JSON object, or a stream of chunks."""
    with generator.admitted(request.n, request.priority) as admission:
        return await _chat(generator, model, request, http, admission)


async def _chat(
    generator: Generator, model: str, request: ChatRequest, http: Request, admission: Admission
) -> Response | dict[str, Any]:
    prompt = await asyncio.to_thread(prompt_ids, generator.tokenizer, request)
    samplings = for_choices(generator.sampling(request, len(prompt)), request.n)
    start = head("chatcmpl", f"chat.completion{'.chunk' if request.stream else ''}", model, request)
    turn = _Turn(generator, request, prompt, samplings, start, admission)
    if request.stream:
        return event_stream(await unless_disconnected(http, first_item(_chunks(turn))))
    finished = await unless_disconnected(http, generator.collect_all(turn.runs, admission))
    choices = [_choice(generator, request, index, choice) for index, choice in enumerate(finished)]
    generated = sum(len(choice.token_ids) for choice in finished)
    return {**start, "choices": choices, "usage": usage(len(prompt), generated)}


def prompt_ids(tokenizer: Tokenizer, request: ChatRequest) -> list[int]:
    """The conversation through the model's chat template, as token ids.

    Raises Problem `chat_template_refused`.
    """

    def written(*, with_objects: bool) -> str:
        messages = [message.for_template(with_objects=with_objects) for message in request.messages]
        return tokenizer.apply_chat_template(messages, tools=request.offered_tools)

    try:
        try:
            text = written(with_objects=True)
        except DeliverError:  # a template may join a tool call's arguments to text, as DeepSeek's do
            text = written(with_objects=False)
    except DeliverError as error:
        raise Problem(400, "chat_template_refused", f"{error.what}: {error.why}", param="messages") from error
    return tokenizer.encode(text, add_special_tokens=False)


def _choice(generator: Generator, request: ChatRequest, index: int, choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    reason = choice.finish_reason
    if request.offered_tools:
        text, calls = split_tool_calls(choice.text)
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
            reason = "tool_calls"
    logprobs = {"content": _logprobs(generator, choice.logprobs)} if request.logprobs else None
    return {"index": index, "message": message, "finish_reason": reason, "logprobs": logprobs}


async def _chunks(turn: _Turn) -> AsyncIterator[dict[str, Any]]:
    generator, request, start = turn.generator, turn.request, turn.start
    if request.offered_tools:
        # Whether text is a tool call is known only at its end, so such a reply comes in one piece.
        async for chunk in _whole_choices(turn):
            yield chunk
        return
    started: set[int] = set()
    generated = 0
    async for index, output in generator.merge(turn.runs, turn.admission):
        if index not in started:
            started.add(index)
            yield {**start, "choices": [_delta(index, {"role": "assistant", "content": ""}, None, None)]}
        generated += len(output.new_token_ids)
        logprobs = {"content": _logprobs(generator, output.logprobs or [])} if request.logprobs else None
        delta = {"content": output.new_text} if output.new_text or output.finish_reason is None else {}
        yield {**start, "choices": [_delta(index, delta, output.finish_reason, logprobs)]}
    if request.include_usage:
        yield {**start, "choices": [], "usage": usage(len(turn.prompt), generated)}


async def _whole_choices(turn: _Turn) -> AsyncIterator[dict[str, Any]]:
    generator, request, start = turn.generator, turn.request, turn.start
    finished = await generator.collect_all(turn.runs, turn.admission)
    for index, done in enumerate(finished):
        choice = _choice(generator, request, index, done)
        delta = {"role": "assistant", "content": choice["message"]["content"]}
        if calls := choice["message"].get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        yield {**start, "choices": [_delta(index, delta, choice["finish_reason"], choice["logprobs"])]}
    if request.include_usage:
        generated = sum(len(choice.token_ids) for choice in finished)
        yield {**start, "choices": [], "usage": usage(len(turn.prompt), generated)}


def _delta(index: int, delta: dict[str, Any], reason: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}


def _logprobs(generator: Generator, entries: list[Any]) -> list[dict[str, Any]]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        content = generator.tokenizer.token_bytes(token_id)
        text = content.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob, "bytes": list(content)}

    return [
        {**entry(e.token_id, e.logprob), "top_logprobs": [entry(token, value) for token, value in e.top]}
        for e in entries
    ]
