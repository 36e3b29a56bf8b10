"""Limits and policy of the scheduler. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from delivery.errors import UsageError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy.

    max_model_len: prompt and output tokens of one request. max_num_seqs: requests that run at once.
    max_num_batched_tokens: tokens of one step. wait_time_s, ageing_s: see `waiting`.
    enable_prefill: steps may be filled with prompt tokens; False (for chat) carries the running decodes
        first and prompts in what is left. adaptive: see `budget`.
    decode_wait_s: how long decodes that found no room beside prompts stand back before they go first.
    prefill_chunk: tokens of a piece of a prompt longer than `chunk_past`.
    rope_switch: length beyond which LongRoPE rotates otherwise, so that the cache has to be rebuilt.
    """

    max_model_len: int
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 8192
    wait_time_s: float = 0.005
    ageing_s: float = 10.0
    enable_prefill: bool = True
    adaptive: bool = False
    decode_wait_s: float = 0.5
    prefill_chunk: int = 512
    chunk_past: int = 2048
    rope_switch: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise UsageError(
                    "scheduler-invalid", f"{name} is {getattr(self, name)}", why="expected at least 1"
                )
