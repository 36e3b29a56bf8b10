"""Requests and how their tokens are chosen. No torch."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, Literal

from delivery.errors import UsageError

FinishReason = Literal["stop", "length", "abort"]
PRIORITIES = (-1, 0, 1)
MAX_LOGPROBS = 20
_MOST_INT32 = 2**31 - 1
_LARGEST = 3.4e38
"""Numbers are float32 where logits are."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    max_tokens: maximum number of output tokens; None for as many as the session length allows.
    temperature: 0 is greedy (the first of equal logits). top_k: −1 or 0 for all.
    top_p, min_p: nucleus, and the minimum probability relative to that of the most likely token.
    presence_penalty, frequency_penalty: subtracted from logits of output tokens (OpenAI's meaning).
    repetition_penalty: divides positive and multiplies negative logits of prompt and output tokens.
    seed: draws depend only on it and the position, not on the batch; None for one made of the engine's seed
        and the request's place among all that were added.
    stop: one or several strings that end the output and are not part of it; stored as a tuple.
    stop_token_ids: token ids that end the output; they remain in token_ids.
    ignore_eos: the model's own end-of-text tokens do not end the output.
    min_tokens: no end-of-text or stop token, and no stop string, within this many output tokens.
    logprobs: log-probabilities of the chosen token and of this many most likely ones; None for none.
    logit_bias: values added to the logits of these tokens.
    Raises UsageError `sampling-invalid` with the field, its value, what is expected and an example.
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
        self._check_numbers()
        stop: object = self.stop
        stops = (stop,) if isinstance(stop, str) else tuple(self.stop) if _is_listed(stop) else (stop,)
        self._check("stop", all(isinstance(text, str) and text for text in stops), 'stop=["END"]')
        object.__setattr__(self, "stop", stops)
        ids = tuple(self.stop_token_ids) if _is_listed(self.stop_token_ids) else (None,)
        self._check("stop_token_ids", all(map(_is_int, ids)), "stop_token_ids=[2]")
        object.__setattr__(self, "stop_token_ids", ids)
        self._check("ignore_eos", isinstance(self.ignore_eos, bool), "ignore_eos=True")
        biases: object = self.logit_bias
        good = isinstance(biases, Mapping) and all(_is_int(k) and _is_number(v) for k, v in biases.items())
        self._check("logit_bias", good, "logit_bias={42: -100.0}")

    def _check_numbers(self) -> None:
        for name, allowed in _RANGES.items():
            self._check(name, allowed.takes(getattr(self, name)), f"{name}={allowed.example}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(
                "sampling-invalid",
                f"min_tokens is {self.min_tokens!r}",
                why=f"expected from 0 to max_tokens, which is {self.max_tokens}",
                hint=f"min_tokens={self.max_tokens}, or a larger max_tokens",
            )

    def _check(self, name: str, good: bool, example: str) -> None:
        if not good:
            raise UsageError(
                "sampling-invalid",
                f"{name} is {reprlib.repr(getattr(self, name))}",
                why=f"expected {_RANGES[name].words if name in _RANGES else _EXPECTED[name]}",
                hint=f"such as {example}",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the next token's logits depend on which tokens came before (penalties)."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True)
class _Range:
    """The allowed numbers of a field: from least to most, both included; `over` excludes the least."""

    words: str
    example: object
    least: float = 0.0
    most: float = math.inf
    over: bool = False
    whole: bool = False
    none: bool = False

    def takes(self, value: object) -> bool:
        if value is None:
            return self.none
        if not (_is_int(value) if self.whole else _is_number(value)):
            return False
        number: Any = value
        return bool(self.least <= number <= self.most) and not (self.over and number == self.least)


_RANGES: Mapping[str, _Range] = {
    "max_tokens": _Range("a whole number of at least 1, or None", 16, least=1, whole=True, none=True),
    "temperature": _Range("a number from 0; 0 is greedy", 0.0),
    "top_p": _Range("a number over 0 and at most 1", 1.0, most=1, over=True),
    "top_k": _Range("a whole number: −1 for all tokens, or a count", -1, -1, _MOST_INT32, whole=True),
    "min_p": _Range("a number from 0 to 1", 0.0, most=1),
    "presence_penalty": _Range("a number from −2 to 2", 0.0, least=-2, most=2),
    "frequency_penalty": _Range("a number from −2 to 2", 0.0, least=-2, most=2),
    "repetition_penalty": _Range("a number over 0; 1 changes nothing", 1.0, over=True),
    "seed": _Range("a whole number, or None", 0, least=-math.inf, whole=True, none=True),
    "min_tokens": _Range("a whole number from 0 to max_tokens", 0, whole=True),
    "logprobs": _Range(
        f"a whole number from 0 to {MAX_LOGPROBS}, or None", 5, most=MAX_LOGPROBS, whole=True, none=True
    ),
}
_EXPECTED = {
    "stop": "one or several non-empty strings",
    "stop_token_ids": "token ids",
    "ignore_eos": "True or False",
    "logit_bias": "a mapping of token ids to finite numbers",
}


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    number: Any = value
    return bool(
        -_LARGEST <= number <= _LARGEST
    )  # compared, not converted: an integer may be too large for a float


def _is_listed(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


class Status(StrEnum):
    """The state of a request. `QUEUED` and `PREEMPTED` requests hold no blocks."""

    QUEUED = "queued"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and its output so far. Created by the caller; owned by the scheduler once it is added.

    priority: −1 is the highest, then 0, then 1.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0

    # Set by the scheduler; nobody else writes these.
    number: int = 0
    """Place in the order in which requests were added, from 1."""
    arrival_s: float = 0.0
    max_tokens: int = 0
    """Maximum number of output tokens, limited by the session length."""
    status: Status = Status.QUEUED
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    slot: int = -1
    """Index into the device's per-request buffers while running."""
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Hash chain over the full blocks of the known tokens."""
    long_rope: bool = False
    """Whether keys are rotated with LongRoPE's long factors; a prefix is shared only if this is equal."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are written by the steps scheduled so far."""
    num_pending: int = 0
    """Tokens being sampled by scheduled steps, not yet reported; they follow the known ones."""
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
        """Whether the only token not yet computed is the last one."""
        return self.num_computed_tokens == self.total_tokens - 1 and self.total_tokens > len(
            self.prompt_token_ids
        )

    @property
    def exhausted(self) -> bool:
        """Whether all allowed output tokens are known or being sampled."""
        return len(self.output_token_ids) + self.num_pending >= self.max_tokens

    def tokens(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    def check(self) -> None:
        """Raises UsageError `request-invalid` for a request that no engine can run."""
        problem, hint = "", ""
        if not self.prompt_token_ids:
            problem, hint = "the prompt has no tokens", "pass a string, or at least one token id"
        elif self.priority not in PRIORITIES:
            problem = f"priority is {self.priority}, expected one of {PRIORITIES}"
        if problem:
            raise UsageError(
                "request-invalid", f"request {self.request_id} cannot be run", why=problem, hint=hint
            )
