"""Prompts that a context cannot hold are skipped, unless too little is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from delivery.bench.fitting import fitting
from delivery.errors import UsageError
from delivery.gate.outputs.suite import Suite, parse_suite


def suite(*words: int, timed: str = "p0") -> Suite:
    """A suite whose prompts have these numbers of words; each asks for 10 tokens."""
    prompts: list[dict[str, Any]] = [
        {"id": f"p{i}", "messages": [{"role": "user", "content": "x " * n}], "max_tokens": 10}
        for i, n in enumerate(words)
    ]
    return parse_suite({"version": 1, "name": "s", "prompts": prompts, "timing": {"prompt": timed}}, "s")


def words_of(messages: Sequence[Mapping[str, str]]) -> int:
    return sum(len(m["content"].split()) for m in messages)


def test_the_prompts_that_fit_are_kept_and_the_others_are_named() -> None:
    (kept,), skipped = fitting([suite(20, 90, 91)], words_of, "the engine holds", 100)
    assert [p.id for p in kept.prompts] == ["p0", "p1"]
    assert [(s.prompt, s.tokens, s.max_tokens) for s in skipped] == [("p2", 91, 10)]


@pytest.mark.parametrize(("words", "timed"), [((20, 91, 91), "p0"), ((91, 20, 20), "p0")])
def test_too_little_is_left(words: tuple[int, ...], timed: str) -> None:
    with pytest.raises(UsageError, match="cannot fit") as caught:
        fitting([suite(*words, timed=timed)], words_of, "the engine holds", 100)
    assert caught.value.code == "request-too-long"
    assert "91 prompt tokens and up to 10 output tokens; the engine holds 100" in caught.value.why


def test_an_answer_to_come_is_not_shown_as_an_empty_one() -> None:
    """Mistral's templates refuse an assistant's message without content."""
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant"},
        {"role": "user", "content": "y"},
    ]
    two = parse_suite({"version": 1, "prompts": [{"id": "a", "messages": turns, "max_tokens": 10}]}, "s")

    def strict(messages: Sequence[Mapping[str, str]]) -> int:
        assert all(m["content"] for m in messages)
        return words_of(messages)

    assert fitting([two], strict, "the engine holds", 23)[1] == []
    with pytest.raises(UsageError, match="cannot fit"):
        fitting([two], strict, "the engine holds", 22)
