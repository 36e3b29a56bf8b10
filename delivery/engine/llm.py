"""LLM: offline use of the engine, a thin loop over EngineCore."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch

from delivery.engine.core import EngineCore, Request
from delivery.engine.outputs import EngineStats, TokenLogprobs
from delivery.engine.request import FinishReason, SamplingParams
from delivery.errors import UsageError


@dataclass(slots=True)
class Completion:
    """One prompt's output. logprobs: one entry a token, where they were asked for."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0


class LLM:
    """An engine that completes and scores texts.

    path: an engine directory, a quantised checkpoint or a plain Hugging Face directory.
    options: `EngineOptions`, among them device, max_model_len, kv, block_size, seed.
    Use as a context manager, or call `close`.
    """

    def __init__(self, path: Path | str, device: str = "auto", **options: Any) -> None:
        # Nobody else will join: waiting for company would only cost time.
        self.core = EngineCore(path, device=device, **{"wait_time_ms": 0.0, **options})
        self._count = 0

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete every prompt, a text or token ids; one SamplingParams for all, or one each. A text
        alone is one prompt.

        Raises UsageError for a request that cannot run, before any is started.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        params = self._params(sampling, len(prompts))
        requests = {}
        try:
            for prompt, chosen in zip(prompts, params, strict=True):
                request = Request(f"llm-{self._count}", self.encode(prompt), chosen)
                self._count += 1
                self.core.add_request(request)
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
        """Logits [n, vocabulary] of consecutive tokens of one sequence, in pieces of it."""
        return self.core.prompt_logits(token_ids)

    def score(self, texts: str | Sequence[str | Sequence[int]]) -> list[np.ndarray[Any, Any]]:
        """Per text n − 1 natural-log probabilities, float32: token i given the tokens before it. None for
        a text of one token or of none."""
        return [self._score(self.encode(text)) for text in ([texts] if isinstance(texts, str) else texts)]

    def _score(self, token_ids: list[int]) -> np.ndarray[Any, Any]:
        pieces, at = [torch.empty(0)], 1
        for logits in self.logits(token_ids):
            targets = torch.tensor(token_ids[at : at + len(logits)], device=logits.device)
            logprobs = torch.log_softmax(logits[: len(targets)].float(), dim=-1)
            pieces.append(logprobs.gather(1, targets[:, None])[:, 0].cpu())
            at += len(logits)
        return torch.cat(pieces).numpy()

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt as the model tokenises it, start token included where it adds one."""
        if not isinstance(prompt, str):
            try:
                return [index(token) for token in prompt]
            except TypeError as error:
                what = f"a prompt is {reprlib.repr(prompt)}"
                raise UsageError("request-invalid", what, why="expected a text or token ids") from error
        if self.core.tokenizer is None:
            raise UsageError(
                "tokenizer-missing",
                "this model has no tokenizer",
                why="a prompt was given as text",
                hint="give token ids, or put tokenizer.json into the model's directory",
            )
        return self.core.tokenizer.encode(prompt)

    def stats(self) -> EngineStats:
        return self.core.stats()

    @staticmethod
    def _params(
        sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or SamplingParams()] * count
        if len(sampling) != count:
            raise UsageError("sampling-invalid", f"{len(sampling)} sampling parameters for {count} prompts")
        return sampling

    def close(self) -> None:
        """Free everything; the object cannot be used afterwards."""
        self.core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
