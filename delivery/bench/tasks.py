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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
            except (ValueError, KeyError, RecursionError) as error:
                raise DataError(
                    "bad-task",
                    f"{path}:{number} is not a question",
                    why=str(error),
                    hint='{"prompt": "2 + 2 =", "answer": "4"}',
                ) from error
    if not out:
        raise DataError("bad-task", f"the task {path} has no questions")
    return out


def check_names(tasks: Sequence[str]) -> None:
    """A task is known by its file's name: of two with one name, one would hide the other.

    Raises UsageError `bad-value`.
    """
    named = [Path(task).stem for task in tasks]
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise UsageError(
            "bad-value",
            f"two tasks are named {twice!r}",
            why="their results have the same name, and one would hide the other",
            hint="rename one of the files",
        )


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


def _question(data: Any) -> Question:
    """A question from its JSON. Raises ValueError, and KeyError where it has no answer."""
    if not isinstance(data, dict):
        raise ValueError(f"expected an object, got {data!r}")
    if unknown := data.keys() - _KEYS:
        raise ValueError(f"unknown key {sorted(unknown)[0]!r}, known: {', '.join(sorted(_KEYS))}")
    answers = _texts("answer", data["answer"] if isinstance(data["answer"], list) else [data["answer"]])
    choices = _texts("choices", data.get("choices") or [])
    prompt, messages = data.get("prompt") or "", data.get("messages") or []
    if not (prompt or messages) or not answers:
        raise ValueError("a question has a prompt or messages, and an answer")
    if choices and not set(answers) & set(choices):
        raise ValueError(f"the answer {answers[0]!r} is not among the choices")
    if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
        raise ValueError("messages is a list of objects with a role and a content")
    max_tokens = data.get("max_tokens", _MAX_TOKENS)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ValueError(f"max_tokens is a whole number of at least 1, got {max_tokens!r}")
    if not isinstance(prompt, str):
        raise ValueError(f"prompt is a text, got {prompt!r}")
    return Question(prompt, tuple(messages), choices, answers, max_tokens)


def _texts(key: str, values: Any) -> tuple[str, ...]:
    """Texts that are not empty; a number is taken as it is written."""
    if not isinstance(values, list):
        raise ValueError(f"{key} is a list of texts, got {values!r}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
            raise ValueError(f"{key}: expected a text, got {value!r}")
    return tuple(map(str, values))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))
