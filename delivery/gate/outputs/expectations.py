"""Expectations: the faults of one answer, as sentences that name what was expected and found."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivery.gate.outputs.garbling import garbled
from delivery.gate.outputs.language import language_of
from delivery.gate.outputs.loops import TOKEN, find_loop
from delivery.gate.outputs.markers import leaked_markers

if TYPE_CHECKING:
    from delivery.gate.outputs.suite import Expectation

_FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)
_JUDGE_LANGUAGE_FROM = 12
"""Fewer letters do not identify a language."""


@dataclass(frozen=True, slots=True)
class Fault:
    """kind: empty | unstopped | marker | garbled | loop | expectation."""

    kind: str
    text: str


def faults(
    text: str, raw: str, finish_reason: str | None, expect: Expectation, special_tokens: tuple[str, ...] = ()
) -> list[Fault]:
    """Everything that is wrong with an answer.

    text: the visible answer. raw: the same with special tokens kept, without the one that ended it.
    finish_reason: "stop" or "length".
    """
    answer = text.strip()
    out = []
    cut = finish_reason != "stop"
    if cut and expect.ends:
        out.append(Fault("unstopped", "the answer does not end within its token limit"))
    if not answer:
        return [*out, Fault("empty", "the answer is empty")]
    if markers := leaked_markers(raw, special_tokens):
        out.append(Fault("marker", f"markers of the chat template in the answer: {' '.join(markers[:3])}"))
    out += [Fault("garbled", reason) for reason in garbled(answer, cut=cut)]
    if not expect.loops and (loop := find_loop(answer)):
        out.append(Fault("loop", f"the answer repeats itself: {loop}"))
    out += [Fault("expectation", reason) for reason in _unmet(answer, expect)]
    return out


def _unmet(answer: str, expect: Expectation) -> list[str]:
    folded = answer.casefold()
    out = [
        f"expected {' or '.join(map(repr, choices))}"
        for choices in expect.contains
        if not any(choice.casefold() in folded for choice in choices)
    ]
    out += [f"expected a match of /{p}/" for p in expect.regex if not re.search(p, answer, re.MULTILINE)]
    out += [f"{word!r} must not appear" for word in expect.absent if word.casefold() in folded]
    count = sum(1 for t in TOKEN.findall(answer) if t[0].isalnum())
    low, high = expect.words
    if not low <= count <= high:
        out.append(f"{count} words, expected {low} to {high}")
    if expect.json is not False and (reason := _not_json(answer, expect.json)):
        out.append(reason)
    letters = sum(c.isalpha() for c in answer)
    if expect.language and expect.json is False and letters >= _JUDGE_LANGUAGE_FROM:
        found = language_of(answer)
        if found and found != expect.language:
            out.append(f"the answer is in {found!r}, expected {expect.language!r}")
    return out


def _not_json(answer: str, wanted: bool | tuple[str, ...]) -> str:
    fenced = _FENCE.search(answer)
    try:
        value = json.loads(fenced[1] if fenced else answer)
    except ValueError as error:
        return f"not JSON: {error}"
    if isinstance(wanted, tuple):
        missing = [k for k in wanted if not isinstance(value, dict) or k not in value]
        return f"JSON without {', '.join(missing)}" if missing else ""
    return ""
