"""Recorder: collects what happens to one request and makes its record. Times are the run's own seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from delivery.gate.record import RequestRecord


@dataclass(slots=True)
class Recorder:
    """Filled in by a target while a request runs."""

    id: str
    scheduled_s: float
    sent_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_times_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    def chunk(self, now_s: float, tokens: int) -> None:
        """A chunk that carried `tokens` tokens, or text that is not empty."""
        self.token_times_s.append(now_s)
        self.output_tokens += tokens

    def record(self) -> RequestRecord:
        """The record; without any chunk it is an error."""
        times = self.token_times_s
        silent = None if times or self.error else "the answer had no tokens"
        return RequestRecord(
            id=self.id,
            scheduled_s=self.scheduled_s,
            sent_s=self.sent_s,
            first_token_s=times[0] if times else None,
            last_token_s=times[-1] if times else None,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            token_times_s=tuple(times),
            finish_reason=self.finish_reason,
            error=self.error or silent,
        )
