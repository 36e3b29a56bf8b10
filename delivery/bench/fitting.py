"""Which prompts of smoke suites fit the context of a model: the others are skipped, and said to be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from delivery.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from delivery.gate.outputs.suite import Prompt, Suite

    Count = Callable[[Sequence[Mapping[str, str]]], int]

_MOST_SKIPPED = 0.5
"""Share of a suite's prompts that may be skipped; what is left would say little about the model."""
_ANSWER = "."
"""In the place of an answer that the model has still to give; its tokens are counted apart."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A prompt that does not fit. tokens: of its conversation; max_tokens: of all answers to it."""

    suite: str
    prompt: str
    tokens: int
    max_tokens: int

    def __str__(self) -> str:
        return f"{self.tokens} prompt tokens and up to {self.max_tokens} output tokens"


def fitting(
    suites: Sequence[Suite], count: Count, holder: str, most: int
) -> tuple[list[Suite], list[Skipped]]:
    """The suites without the prompts that do not fit, and those prompts.

    count: returns the tokens of a conversation. most: tokens of input and output; holder: whose limit
    that is, in words. Raises UsageError `request-too-long` if a suite's timed prompt does not fit, or less
    than half of its prompts.
    """
    kept: list[Suite] = []
    skipped: list[Skipped] = []
    for suite in suites:
        sizes = {prompt.id: _of(suite, prompt, count) for prompt in suite.prompts}
        too_long = {name: size for name, size in sizes.items() if size.tokens + size.max_tokens > most}
        if suite.timing_prompt in too_long or len(too_long) > _MOST_SKIPPED * len(suite.prompts):
            worst = too_long.get(suite.timing_prompt) or max(too_long.values(), key=lambda s: s.tokens)
            raise UsageError(
                "request-too-long",
                f"{len(too_long)} of {len(suite.prompts)} prompts of the suite {suite.name} cannot fit",
                why=f"{worst.prompt!r} has {worst}; {holder} {most}",
                hint="other --suites, or build --max-session-len",
            )
        kept.append(replace(suite, prompts=tuple(p for p in suite.prompts if p.id not in too_long)))
        skipped += too_long.values()
    return kept, skipped


def _of(suite: Suite, prompt: Prompt, count: Count) -> Skipped:
    # The model also writes the assistant's messages that have no content; some templates refuse empty ones.
    given = [
        {"role": str(m["role"]), "content": _ANSWER if m["content"] is None else m["content"]}
        for m in prompt.messages
    ]
    answers = 1 + sum(m["content"] is None for m in prompt.messages)
    return Skipped(suite.name, prompt.id, count(given), answers * prompt.max_tokens)
