"""Loops: text that repeats itself, the classic sign of a wrong rotary base or a broken cache.

Small models repeat themselves a little (lists, refrains), so one repeated sentence is not a loop. Three signs
are looked for, each over words and punctuation marks (characters where a script has no spaces): a block
that comes back over and over to the end of the text, such a block anywhere that makes up much of the
text, and few distinct four-grams.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

TOKEN = re.compile(
    r"[\u2e80-\u9fff\uf900-\ufaff\u3040-\u30ff\uac00-\ud7af\u0e00-\u0e7f]"  # one character each
    r"|[^\W_]+(?:['’][^\W_]+)*|[-=_*#~.|─—·]+|[^\s\w]|_"  # a ruled line is one mark
)
_END_REPEATS, _END_TOKENS = 4, 20
_ANY_REPEATS, _ANY_TOKENS, _ANY_SHARE = 6, 36, 0.35
_GRAM, _GRAM_TOKENS, _MIN_DISTINCT = 4, 40, 0.45
_LONGEST_PERIOD = 80


@dataclass(frozen=True, slots=True)
class Loop:
    """What repeats: the block as text, and how often it comes; 0 times when only its words keep coming."""

    block: str
    times: int

    def __str__(self) -> str:
        shown = self.block if len(self.block) <= 60 else f"{self.block[:57]}..."
        return f"{shown!r} {self.times} times" if self.times else f"few different phrases, such as {shown!r}"


def find_loop(text: str) -> Loop | None:
    """The loop in a text, or None."""
    # A list that counts its repetitions up ("4. Chess 5. Chess") repeats itself all the same.
    tokens = ["0" if t.isdigit() else t.lower() for t in TOKEN.findall(text)]
    for period in range(1, min(_LONGEST_PERIOD, len(tokens) // 2) + 1):
        length, end = _longest_run(tokens, period)
        repeats = length // period
        if not any(t[0].isalpha() for t in tokens[end - period : end]) and "0" in tokens[end - period : end]:
            continue  # numbers in a row count, they do not loop
        at_end = end == len(tokens)
        if at_end and repeats >= _END_REPEATS and length >= _END_TOKENS:
            return Loop(_joined(tokens[end - period : end]), repeats)
        if repeats >= _ANY_REPEATS and length >= _ANY_TOKENS and length >= _ANY_SHARE * len(tokens):
            return Loop(_joined(tokens[end - period : end]), repeats)
    if len(tokens) >= _GRAM_TOKENS and distinct_share(tokens) < _MIN_DISTINCT:
        grams = [tuple(tokens[i : i + _GRAM]) for i in range(len(tokens) - _GRAM + 1)]
        return Loop(_joined(list(Counter(grams).most_common(1)[0][0])), 0)
    return None


def distinct_share(tokens: list[str], size: int = _GRAM) -> float:
    """Distinct n-grams over all n-grams; 1.0 when there are none."""
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _longest_run(tokens: list[str], period: int) -> tuple[int, int]:
    """Length and end of the longest stretch that repeats with this period; the later one of equals."""
    best = (0, 0)
    run = 0
    for i in range(period, len(tokens)):
        run = run + 1 if tokens[i] == tokens[i - period] else 0
        if run and run + period >= best[0]:
            best = (run + period, i + 1)
    return best


def _joined(tokens: list[str]) -> str:
    return " ".join(tokens)
