"""From a parsed request to tokens: what completions and chat have in common."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from delivery.engine.request import SamplingParams
from delivery.errors import DeliverError, EnvironmentLacking
from delivery.serving.problem import Problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from delivery.checkpoint import Tokenizer
    from delivery.engine.outputs import RequestOutput
    from delivery.serving.engine_client import EngineClient
    from delivery.serving.metrics import ServerMetrics
    from delivery.serving.schema import ChatRequest, CompletionRequest

_RETRY_AFTER_S = 2.0


@dataclass
class Choice:
    """One finished output. `logprobs` has one entry per token if requested."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str = "stop"


@dataclass
class Admission:
    """Places in the queue that are kept for requests whose text is still being tokenised."""

    engine: EngineClient
    priority: int
    left: int = 0

    def keep(self, places: int) -> None:
        self.left += places
        self.engine.reserved += places


@dataclass(frozen=True)
class Generator:
    """Runs prompts on the engine. `max_queue` requests may wait; beyond that callers get 429."""

    engine: EngineClient
    tokenizer: Tokenizer
    metrics: ServerMetrics
    max_queue: int

    def sampling(self, request: CompletionRequest | ChatRequest, prompt_tokens: int) -> SamplingParams:
        """The request's sampling parameters; refuses a length that cannot fit, with both numbers."""
        assert self.engine.ready is not None
        limit = self.engine.ready.stats.max_model_len
        wanted = getattr(request, "max_completion_tokens", None) or request.max_tokens
        room = limit - prompt_tokens
        if room < 1 or (wanted is not None and wanted > room):
            asked = f" plus {wanted} output tokens" if wanted is not None else ""
            raise Problem(
                400,
                "context_length_exceeded",
                f"{prompt_tokens} prompt tokens{asked} do not fit: max_model_len is {limit}",
                param="messages" if hasattr(request, "messages") else "prompt",
            )
        logprobs = request.logprobs
        if isinstance(logprobs, bool):
            logprobs = (getattr(request, "top_logprobs", None) or 0) if logprobs else None
        try:
            return self._params(request, wanted or min(room, request.unstated_max_tokens or room), logprobs)
        except DeliverError as error:
            raise Problem(400, "invalid_value", f"{error.what}: {error.why}") from error

    @staticmethod
    def _params(
        request: CompletionRequest | ChatRequest, max_tokens: int, logprobs: int | None
    ) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=-1 if request.top_k is None else request.top_k,
            min_p=0.0 if request.min_p is None else request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
            seed=request.seed,
            logit_bias=request.logit_bias,
            stop=tuple(request.stop_strings),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=request.ignore_eos,
            min_tokens=request.min_tokens,
            logprobs=logprobs,
        )

    def check_engine(self) -> None:
        """Refuse with 503 when the engine is gone."""
        if self.engine.failure is not None:
            raise Problem(503, "engine_unavailable", self.engine.failure.what, retry_after_s=30)

    @contextlib.contextmanager
    def admitted(self, count: int, priority: int) -> Iterator[Admission]:
        """Refuse with 429 when too many requests wait; else keep places for these until they begin."""
        self.check_engine()
        most = self.max_queue + (self.engine.stats.max_num_seqs if self.engine.stats else 0)
        if count > most:
            raise Problem(400, "invalid_value", f"{count} outputs were asked for, this server takes {most}")
        if self.engine.waiting_after(count) > self.max_queue:
            waiting = self.engine.waiting_after(0)
            raise Problem(
                429,
                "queue_full",
                f"{waiting} requests are already waiting (limit {self.max_queue})",
                retry_after_s=_RETRY_AFTER_S,
            )
        admission = Admission(self.engine, priority)
        admission.keep(count)
        try:
            yield admission
        finally:
            admission.keep(-admission.left)

    async def stream(
        self, prompt: list[int], sampling: SamplingParams, admission: Admission
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one prompt, timed. Engine errors become Problems."""
        timer = self.metrics.accepted(len(prompt))
        reason = "cancelled"
        admission.keep(-1)  # from here on the engine client counts it
        try:
            async for output in self.engine.stream(uuid.uuid4().hex, prompt, sampling, admission.priority):
                if output.new_token_ids:
                    timer.chunk()
                reason = output.finish_reason or reason
                yield output
        except DeliverError as error:
            reason = "error"
            status = 503 if self.engine.failure is not None or isinstance(error, EnvironmentLacking) else 400
            raise Problem(status, error.code.replace("-", "_"), f"{error.what}: {error.why}") from error
        finally:
            timer.end(reason)

    async def collect(self, prompt: list[int], sampling: SamplingParams, admission: Admission) -> Choice:
        """One prompt to its end."""
        choice = Choice()
        async for output in self.stream(prompt, sampling, admission):
            choice.text += output.new_text
            choice.token_ids += output.new_token_ids
            choice.logprobs += output.logprobs or []
            choice.finish_reason = output.finish_reason or choice.finish_reason
        return choice

    async def collect_all(
        self, runs: list[tuple[list[int], SamplingParams]], admission: Admission
    ) -> list[Choice]:
        """Several prompts at once, each to its end."""
        return await asyncio.gather(*(self.collect(prompt, s, admission) for prompt, s in runs))

    async def merge(
        self, runs: list[tuple[list[int], SamplingParams]], admission: Admission
    ) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Several prompts at once, outputs tagged with their index in the order in which they arrive."""
        arrivals: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

        async def pump(index: int, prompt: list[int], sampling: SamplingParams) -> None:
            try:
                async for output in self.stream(prompt, sampling, admission):
                    arrivals.put_nowait((index, output))
                arrivals.put_nowait((index, None))
            except Problem as problem:
                arrivals.put_nowait((index, problem))

        tasks = [asyncio.create_task(pump(i, p, s)) for i, (p, s) in enumerate(runs)]
        try:
            left = len(tasks)
            while left:
                index, item = await arrivals.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def head(kind: str, object_name: str, model: str, request: CompletionRequest | ChatRequest) -> dict[str, Any]:
    """What every reply or chunk of one request begins with. kind: prefix of its id, as OpenAI's API has it.

    A stream that ends with token counts has `usage: null` until then.
    """
    made: dict[str, Any] = {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": object_name,
        "created": int(time.time()),
        "model": model,
    }
    return made | {"usage": None} if request.stream and request.include_usage else made


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The `usage` object of a reply."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def for_choices(sampling: SamplingParams, n: int) -> list[SamplingParams]:
    """`n` copies whose seeds differ, so that n choices of one seeded request are n different samples."""
    if sampling.seed is None:
        return [sampling] * n
    return [dataclasses.replace(sampling, seed=sampling.seed + i) for i in range(n)]
