"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import codecs
from typing import TYPE_CHECKING, Any

from delivery.serving.generation import Generator, for_choices, head, usage
from delivery.serving.streaming import event_stream, first_item, unless_disconnected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from starlette.requests import Request
    from starlette.responses import Response

    from delivery.checkpoint import Tokenizer
    from delivery.engine.outputs import TokenLogprobs
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
    start = head("cmpl", "text_completion", model, request)
    if request.stream:
        chunks = _chunks(generator, request, runs, start, admission)
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
                "logprobs": None if request.logprobs is None else _Logprobs(tokenizer).of(choice.logprobs),
            }
        )
    generated = sum(len(choice.token_ids) for choice in finished)
    return {**start, "choices": choices, "usage": usage(sum(map(len, prompts)), generated)}


def _encode(generator: Generator, request: CompletionRequest) -> list[list[int]]:
    return [generator.tokenizer.encode(p) if isinstance(p, str) else p for p in request.prompts]


async def _chunks(
    generator: Generator,
    request: CompletionRequest,
    runs: list[tuple[list[int], SamplingParams]],
    start: dict[str, Any],
    admission: Admission,
) -> AsyncIterator[dict[str, Any]]:
    generated = 0
    logprobs = [_Logprobs(generator.tokenizer) for _ in runs]
    async for index, output in generator.merge(runs, admission):
        generated += len(output.new_token_ids)
        asked = request.logprobs is not None
        choice = {
            "index": index,
            "text": output.new_text,
            "finish_reason": output.finish_reason,
            "logprobs": logprobs[index].of(output.logprobs or []) if asked else None,
        }
        yield {**start, "choices": [choice]}
    if request.include_usage:
        prompt_tokens = sum(len(prompt) for prompt, _ in runs[:: request.n])
        yield {**start, "choices": [], "usage": usage(prompt_tokens, generated)}


class _Logprobs:
    """Log-probabilities of one choice in this endpoint's form, piece by piece.

    Tokens are as they stand in the text, SentencePiece's blanks included; one that holds a part of a
    character is written `bytes:\\xe2`, and a special one, which the text leaves out, by its name.
    `text_offset` counts characters of the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.special_tokens.values())
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """The next tokens of the choice."""
        found = list(entries)
        return {
            "tokens": [self._text(entry.token_id) for entry in found],
            "token_logprobs": [entry.logprob for entry in found],
            "top_logprobs": [self._top(entry) for entry in found],
            "text_offset": [self._advance(entry.token_id) for entry in found],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the chosen one where it is none of them."""
        top = {self._text(token): value for token, value in entry.top}
        return top | {self._text(entry.token_id): entry.logprob}

    def _text(self, token_id: int) -> str:
        content = self._tokenizer.token_bytes(token_id)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _advance(self, token_id: int) -> int:
        """Where the token begins."""
        begins = self._offset
        if token_id not in self._special:
            self._offset += len(self._characters.decode(self._tokenizer.token_bytes(token_id)))
        return begins
