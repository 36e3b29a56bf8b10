"""LLM: offline use of the engine, a thin loop over EngineCore."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from delivery.checkpoint import Tokenizer
from delivery.engine.core import EngineCore, Request
from delivery.engine.forked import check_process
from delivery.engine.outputs import EngineStats, TokenLogprobs
from delivery.engine.request import FinishReason, SamplingParams
from delivery.errors import EnvironmentLacking, UsageError

Message = Mapping[str, Any]
_MESSAGES = 'a list of messages: [{"role": "user", "content": "a text"}]'
_PROMPTS = 'a string, or a list of strings and lists of token ids: ["a text", [1, 2, 3]]'


@dataclass(slots=True)
class Completion:
    """The output for one prompt. logprobs: one entry per token, if requested."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0


class LLM:
    """An engine that completes and scores text.

    path: an engine directory, a quantised checkpoint or a plain Hugging Face directory.
    options: `EngineOptions`, among them device, max_model_len, kv, block_size, seed.
    Use it as a context manager, or call `close`. Only one thread may use it at a time. Child processes must
    be started with spawn, not fork, and create their own LLM.
    Raises UsageError `engine-option-invalid`, `engine-forked`, and what EngineCore raises.
    """

    def __init__(self, path: Path | str, device: str = "auto", **options: Any) -> None:
        for name, value, good in (("path", path, (str, PathLike)), ("device", device, (str,))):
            if not isinstance(value, good):
                raise UsageError(
                    "engine-option-invalid",
                    f"{name} is {reprlib.repr(value)}",
                    why="expected the directory of an engine or a model, and 'auto', 'cpu' or 'cuda'",
                    hint='LLM("DIR", device="auto")',
                )
        check_process()
        try:
            # No other requests will arrive: waiting for a larger batch would only cost time.
            self.core = EngineCore(path, device=device, **{"wait_time_ms": 0.0, **options})
        except EnvironmentLacking as error:
            if error.code == "no-gpu":
                error.hint = f'LLM({str(path)!r}, device="cpu"); `deliver doctor` looks for the GPU'
            raise
        except UsageError as error:
            raise _in_python(error) from error.__cause__
        self._count = 0

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete every prompt, a string or token ids; with one SamplingParams for all, or one per prompt. A
        single string is one prompt.

        Raises UsageError for a request that cannot run, before any is started.
        """
        check_process()
        given = _several(prompts, "prompts", _PROMPTS)
        return self._complete([self.encode(prompt) for prompt in given], sampling)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer a conversation, or each of several. Messages have a role and a content and are rendered with
        the model's chat template.

        Raises UsageError as `generate`, `tokenizer-missing`; DataError if the template rejects them.
        """
        check_process()
        given = _several(messages, "messages", _MESSAGES)
        alone = bool(given) and all(isinstance(message, Mapping) for message in given)
        talks = [given] if alone else [_several(talk, "a conversation", _MESSAGES) for talk in given]
        for message in (message for talk in talks for message in talk):
            if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
                raise _refused("a message", message, _MESSAGES)
        tokenizer = self._tokenizer("a conversation was given")
        texts = [_whole(tokenizer.apply_chat_template(talk)) for talk in talks]
        return self._complete([tokenizer.encode(t, add_special_tokens=False) for t in texts], sampling)

    def _complete(
        self, prompts: list[list[int]], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Completion]:
        params = self._params(sampling, len(prompts))
        requests: dict[str, Completion] = {}
        try:
            for prompt, chosen in zip(prompts, params, strict=True):
                request = Request(f"llm-{self._count}", prompt, chosen)
                self._count += 1
                try:
                    self.core.add_request(request)
                except UsageError as error:
                    error.what = error.what.replace(
                        f"request {request.request_id}", f"prompt {len(requests)}"
                    )
                    raise _in_python(error) from error.__cause__
                requests[request.request_id] = Completion(logprobs=None if chosen.logprobs is None else [])
            while self.core.has_unfinished():
                for output in self.core.step():
                    made = requests[output.request_id]
                    made.text += output.new_text
                    made.token_ids += output.new_token_ids
                    made.finish_reason = output.finish_reason
                    made.num_cached_tokens = output.num_cached_tokens
                    if made.logprobs is not None:
                        made.logprobs += output.logprobs or []
        except BaseException:
            for request_id in requests:
                self.core.abort(request_id)
            raise
        return list(requests.values())

    def logits(self, token_ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield logits [n, vocabulary] of consecutive pieces of one sequence."""
        check_process()
        return self.core.prompt_logits(self.encode(token_ids))

    def score(self, texts: str | Sequence[str | Sequence[int]]) -> list[np.ndarray[Any, Any]]:
        """For each text of n tokens, n − 1 natural-log probabilities, float32: of each token given those
        before it; an empty array for a text of at most one token."""
        check_process()
        return [self._score(self.encode(text)) for text in _several(texts, "texts", _PROMPTS)]

    def _score(self, token_ids: list[int]) -> np.ndarray[Any, Any]:
        pieces, at = [torch.empty(0)], 1
        for logits in self.logits(token_ids):
            targets = torch.tensor(token_ids[at : at + len(logits)], device=logits.device)
            logprobs = torch.log_softmax(logits[: len(targets)].float(), dim=-1)
            pieces.append(logprobs.gather(1, targets[:, None])[:, 0].cpu())
            at += len(logits)
        return torch.cat(pieces).numpy()

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt as the model tokenises it, with the start token if it adds one."""
        if isinstance(prompt, str):
            return self._tokenizer("a prompt was given as text").encode(_whole(prompt))
        try:
            if isinstance(prompt, bytes | Mapping) or any(isinstance(token, bool) for token in prompt):
                raise TypeError
            return [index(token) for token in prompt]
        except TypeError as error:
            raise _refused(
                "a prompt", prompt, "a string or token ids", hint=f"prompts are {_PROMPTS}"
            ) from error

    def _tokenizer(self, why: str) -> Tokenizer:
        if self.core.tokenizer is None:
            raise UsageError(
                "tokenizer-missing",
                "this model has no tokenizer",
                why=why,
                hint="pass token ids, or put tokenizer.json into the model's directory",
            )
        return self.core.tokenizer

    def stats(self) -> EngineStats:
        return self.core.stats()

    @staticmethod
    def _params(
        sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or SamplingParams()] * count
        each: list[Any] = list(sampling) if isinstance(sampling, list | tuple) else [sampling]
        if wrong := [one for one in each if not isinstance(one, SamplingParams)]:
            raise UsageError(
                "sampling-invalid",
                f"sampling is {reprlib.repr(wrong[0])}",
                why="expected one SamplingParams for all prompts, or a list with one per prompt",
                hint="SamplingParams(max_tokens=32, temperature=0.0)",
            )
        if len(each) != count:
            raise UsageError(
                "sampling-invalid",
                f"{len(each)} sampling parameters for {count} prompts",
                why="expected one for all, or one per prompt",
            )
        return each

    def close(self) -> None:
        """Free everything; the object cannot be used afterwards."""
        self.core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _in_python(error: UsageError) -> UsageError:
    """The error with a hint that names Python arguments instead of command-line options."""
    error.hint = re.sub(r"--max-session-len (\d+)", r"max_model_len=\1", error.hint)
    error.hint = error.hint.replace("--max-session-len", "max_model_len")
    return error


def _whole(text: str) -> str:
    """The text, if it is valid Unicode. Raises UsageError `request-invalid`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        why = f"character {error.start} is a lone surrogate, which results from reading invalid UTF-8"
        hint = 'open(..., encoding="utf-8", errors="replace")'
        raise UsageError("request-invalid", "a prompt is not valid Unicode", why=why, hint=hint) from error
    return text


def _several(given: Any, name: str, expected: str) -> list[Any]:
    """The argument as a list; a single string becomes one. Raises UsageError `request-invalid`."""
    if isinstance(given, str) and expected == _PROMPTS:
        return [given]
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise _refused(name, given, expected)
    return list(given)


def _refused(name: str, given: object, expected: str, hint: str = "") -> UsageError:
    verb = "are" if name in ("prompts", "texts", "messages") else "is"
    return UsageError(
        "request-invalid", f"{name} {verb} {reprlib.repr(given)}", why=f"expected {expected}", hint=hint
    )
