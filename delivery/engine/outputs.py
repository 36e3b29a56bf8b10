"""What flows through the engine: scheduler → executor → scheduler → caller. Plain data, no torch.

A SchedulerOutput goes to other processes too (tensor parallel), so it holds numbers, not requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from delivery.engine.request import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that enters the batch in this step (again, after a preemption).

    token_ids: all known tokens. block_ids: their blocks, shared ones first. slot: where the device
    keeps this request's state. num_output: how many of the tokens are output already. number: the
    request's place among all that were added; its own for good.
    """

    slot: int
    request_id: str
    token_ids: tuple[int, ...]
    num_output: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    number: int = 0


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The tokens of one request that this step computes: positions start … start + num_tokens − 1.

    new_block_ids: blocks that it got since the last step. samples: whether the step's last token is the
    sequence's last, so that the next one is sampled. num_output: output tokens, those being sampled
    included, before this step. The token of a decode may still be on the device only.
    """

    slot: int
    start: int
    num_tokens: int
    new_block_ids: tuple[int, ...]
    samples: bool
    num_output: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work, in batch order."""

    step: int
    admitted: tuple[Admitted, ...]
    scheduled: tuple[Scheduled, ...]
    num_tokens: int
    needs_history: bool = False
    """Whether sampling depends on every earlier token, so that no step may be in flight before this one."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities: of the chosen token, and (token, logprob) of the likeliest ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """One token per scheduled entry with `samples`, in their order; logprobs likewise where asked for."""

    step: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a step added to a request. The last one of a request has a finish_reason.

    new_text never ends inside a character nor inside what may become a stop string.
    """

    request_id: str
    new_token_ids: list[int]
    new_text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state. Counters count from its start; ratios are 0 … 1.

    Byte counts are the plan's and stay as they are; `peak_bytes` is the activation peak alone, and
    `overhead_bytes` holds recordings, tables, inputs and the recurrent state of hybrid models.
    """

    running: int = 0
    waiting: int = 0
    kv_usage_ratio: float = 0.0
    batch_token_usage_ratio: float = 0.0
    """Tokens of the last step over the budget."""
    step_seconds: float = 0.0
    """Wall time of the last step."""
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    preemptions: int = 0
    cancelled: int = 0
    finished: int = 0
    weights_bytes: int = 0
    peak_bytes: int = 0
    overhead_bytes: int = 0
    kv_bytes: int = 0
    kv_tokens: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 0
    num_blocks: int = 0
    block_size: int = 0
    adjacent_growth_ratio: float = 0.0
    """Share of growing blocks that were the neighbour of the sequence's last one."""
    extra: dict[str, float] = field(default_factory=dict)
