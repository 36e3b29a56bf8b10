"""Labelled tasks: questions with known answers in a JSONL file, and how many a model gets right.

    {"prompt": "2 + 2 =", "answer": "4"}
    {"prompt": "Is water wet?", "choices": [" yes", " no"], "answer": " yes"}
    {"messages": [{"role": "user", "content": "Capital of France?"}], "answer": ["Paris", "paris"]}

With `choices` the likeliest one counts (mean log-probability per token), otherwise the greedy continuation
has to hold one of the answers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivery.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from delivery.engine import LLM

_KEYS = frozenset({"prompt", "messages", "choices", "answer", "max_tokens"})
_MAX_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Question:
    """One line of a task."""

    prompt: str
    messages: tuple[Mapping[str, str], ...]
    choices: tuple[str, ...]
    answers: tuple[str, ...]
    max_tokens: int


def read_task(path: Path) -> list[Question]:
    """The questions of a JSONL file. Raises DataError `bad-task` with the line."""
    out = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("bad-task", f"the task {path} cannot be read", why=str(error)) from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                out.append(_question(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    "bad-task",
                    f"{path}:{number} is not a question",
                    why=str(error),
                    hint='{"prompt": "2 + 2 =", "answer": "4"}',
                ) from error
    if not out:
        raise DataError("bad-task", f"the task {path} has no questions")
    return out


def accuracy(llm: LLM, questions: Sequence[Question], done: Callable[[int], None]) -> int:
    """How many questions the model answers rightly."""
    from delivery.engine import SamplingParams

    tokenizer: Any = llm.core.tokenizer
    right = 0
    free = [q for q in questions if not q.choices]
    prompts = [tokenizer.encode_chat(q.messages) if q.messages else q.prompt for q in free]
    sampling = [SamplingParams(max_tokens=q.max_tokens, temperature=0.0) for q in free]
    for question, made in zip(free, llm.generate(prompts, sampling), strict=True):
        folded = made.text.casefold()
        right += any(a.casefold() in folded for a in question.answers)
    done(len(free))
    for question in questions:
        if question.choices:
            right += _likeliest(llm, question) in question.answers
            done(1)
    return right


def _likeliest(llm: LLM, question: Question) -> str:
    if question.messages:
        start = llm.core.tokenizer.encode_chat(question.messages)  # type: ignore[union-attr]
    else:
        start = llm.encode(question.prompt)
    means = []
    for choice in question.choices:
        own = llm.core.tokenizer.encode(choice, add_special_tokens=False)  # type: ignore[union-attr]
        scores = llm.score([[*start, *own]])[0]
        means.append(float(scores[-len(own) :].mean()))
    return question.choices[means.index(max(means))]


def _question(data: Mapping[str, Any]) -> Question:
    if unknown := data.keys() - _KEYS:
        raise ValueError(f"unknown key {sorted(unknown)[0]!r}, known: {', '.join(sorted(_KEYS))}")
    answer = data["answer"]
    answers = tuple(answer) if isinstance(answer, list) else (str(answer),)
    choices = tuple(data.get("choices") or ())
    if not (data.get("prompt") or data.get("messages")) or not all(answers):
        raise ValueError("a question has a prompt or messages, and an answer")
    if choices and not set(answers) & set(choices):
        raise ValueError(f"the answer {answers[0]!r} is not among the choices")
    return Question(
        prompt=str(data.get("prompt", "")),
        messages=tuple(data.get("messages") or ()),
        choices=choices,
        answers=answers,
        max_tokens=int(data.get("max_tokens", _MAX_TOKENS)),
    )
