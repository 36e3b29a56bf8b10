"""Requests and how their tokens are chosen. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral
from typing import Any, Literal

from delivery.errors import UsageError

FinishReason = Literal["stop", "length", "abort"]
PRIORITIES = (-1, 0, 1)
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    max_tokens: output tokens at most; None for as many as the session length leaves.
    temperature: 0 is greedy (the first of equal logits). top_k: −1 or 0 for all.
    top_p, min_p: nucleus, and the least share of the likeliest token's probability.
    presence_penalty, frequency_penalty: subtracted from logits of output tokens (OpenAI's meaning).
    repetition_penalty: divides positive and multiplies negative logits of prompt and output tokens.
    seed: draws depend on it and the position alone, not on the batch; None for the engine's seed.
    stop: a text, or several, that end the output and are left out of it; kept as a tuple.
    stop_token_ids: the same, kept in token_ids.
    ignore_eos: the model's own end-of-text tokens do not end the output.
    min_tokens: no end-of-text or stop token before so many output tokens.
    logprobs: log-probabilities of the chosen token and of so many likeliest ones; None for none.
    logit_bias: added to the logits of these tokens.
    Raises UsageError `sampling-invalid` naming the field.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed", "min_tokens", "logprobs"):
            value = getattr(self, name)
            self._check(name, value is None or _is_int(value), "a whole number")
        self._check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        self._check("temperature", 0.0 <= self.temperature < math.inf, "a number from 0")
        self._check("top_p", 0.0 < self.top_p <= 1.0, "over 0 and at most 1")
        self._check("top_k", self.top_k >= -1, "−1 (all) or a count")
        self._check("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1")
        self._check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "from −2 to 2")
        self._check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "from −2 to 2")
        self._check("repetition_penalty", 0.0 < self.repetition_penalty < math.inf, "over 0")
        stop: object = self.stop
        stops = (stop,) if isinstance(stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stops)
        good = all(isinstance(text, str) and text for text in stops)
        self._check("stop", good, "a text or several, none empty")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check("stop_token_ids", all(map(_is_int, self.stop_token_ids)), "token ids")
        biases = self.logit_bias.items()
        good = all(_is_int(token) and math.isfinite(value) for token, value in biases)
        self._check("logit_bias", good, "token id → finite number")
        wanted = self.min_tokens
        self._check("min_tokens", 0 <= wanted <= (self.max_tokens or wanted), "from 0 to max_tokens")
        logprobs = 0 if self.logprobs is None else self.logprobs
        self._check("logprobs", 0 <= logprobs <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}")

    def _check(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise UsageError(
                "sampling-invalid",
                f"{name} is {getattr(self, name)!r}",
                why=f"expected {expected}",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the next token's logits depend on which tokens came before (penalties)."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


class Status(StrEnum):
    """Where a request is. `QUEUED` and `PREEMPTED` hold no blocks."""

    QUEUED = "queued"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and its output so far. Made by the caller; owned by the scheduler once it is added.

    priority: −1 is the highest, then 0, then 1.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0

    # Set by the scheduler; nobody else writes these.
    arrival_s: float = 0.0
    max_tokens: int = 0
    """Output tokens at most, after the session length was taken into account."""
    status: Status = Status.QUEUED
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    slot: int = -1
    """Index into the device's per-request buffers while running."""
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Hash chain over the full blocks of the known tokens."""
    long_rope: bool = False
    """Whether its keys are rotated with LongRoPE's long factors; a prefix is shared among equals only."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are written by the steps scheduled so far."""
    num_pending: int = 0
    """Tokens being sampled by scheduled steps, not yet reported; they stand behind the known ones."""
    num_published: int = 0
    """Leading blocks that other requests may share."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    num_preemptions: int = 0
    last_step: int = -1

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def total_tokens(self) -> int:
        """Known tokens and those being sampled."""
        return self.num_tokens + self.num_pending

    @property
    def in_decode(self) -> bool:
        """Whether the one token not yet computed is the last one."""
        return self.num_computed_tokens == self.total_tokens - 1 and self.total_tokens > len(
            self.prompt_token_ids
        )

    @property
    def exhausted(self) -> bool:
        """Whether all output tokens that it may have are known or being sampled."""
        return len(self.output_token_ids) + self.num_pending >= self.max_tokens

    def tokens(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    def check(self) -> None:
        """Raises UsageError `request-invalid` for what no engine could run."""
        problem: Any = None
        if not self.prompt_token_ids:
            problem = "the prompt has no tokens"
        elif self.priority not in PRIORITIES:
            problem = f"priority is {self.priority}, expected one of {PRIORITIES}"
        if problem:
            raise UsageError("request-invalid", f"request {self.request_id} cannot be run", why=problem)
