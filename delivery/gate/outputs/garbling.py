"""Garbling: text that no writer in any language would produce.

Signs are counted per text and are few on purpose: what a small model writes badly (wrong facts, poor
style) is not garbled. Thresholds were set on outputs of a good small model and of the same model with
noise in its weights, lost attention layers and swapped layers (`tests/gate/data/outputs.json`).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from functools import cache

_RULES = frozenset("-=_*#~.─—·")
_RUN = re.compile(r"(\S)\1{15,}")
_RULE_RUN = 81
_MOJIBAKE = re.compile(r"[ÃÂ][\u0080-\u00bf]|â€|Ã¢|ï»¿|Ð[\u0080-\u00bf]")
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|https?://\S+|\S+@\S+\.\S+|\$[^$\n]*\$", re.DOTALL)
_ODD = re.compile(
    r"[a-z]{2}[A-Z][a-z]"  # case changing inside a word
    r"|\w[\"“”=\[\]{}<>*|\\^~]\w"  # marks inside a word
    r"|\w[,;:!?]+[a-zA-Z]"  # no space after a mark
    r"|[^\s\w*#|.!?:/-]{3,}|[_=]{4,}"  # piles of marks
    r"|[^\W\d_]{22,}"  # words run together
)
_ODD_SHARE, _ODD_WORDS, _ODD_COUNT = 0.045, 20, 3
_MIN_ENTROPY, _ENTROPY_CHARACTERS, _MAX_ENTROPY, _LONG = 2.4, 60, 5.4, 200
_ALPHABETS = ("LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "ARMENIAN", "GEORGIAN", "DEVANAGARI", "THAI")
_MANY_SCRIPTS = 4


def garbled(text: str, *, cut: bool = False) -> list[str]:
    """What is wrong with the text, one sentence each; empty for a clean text.

    cut: the output ended at its token limit, so an incomplete last character is not a fault.
    """
    found = [*_characters(text.rstrip("\ufffd") if cut else text)]
    prose = _CODE.sub(" ", text)
    found += _runs(prose)
    found += _entropy(prose)
    found += _scripts(prose)
    found += _odd_spelling(prose)
    return found


def entropy_bits(text: str) -> float:
    """Shannon entropy of the characters in bits; 0 for an empty text."""
    counts = Counter(text)
    total = sum(counts.values())
    return -sum(n / total * math.log2(n / total) for n in counts.values())


def _characters(text: str) -> list[str]:
    found = []
    if count := text.count("\ufffd"):
        found.append(f"{count} replacement characters (broken UTF-8)")
    bad = [c for c in text if _category(c) in ("Cc", "Co", "Cn", "Cs") and c not in "\n\t\r"]
    if bad:
        found.append(f"{len(bad)} control or unassigned characters, such as U+{ord(bad[0]):04X}")
    if len(marks := _MOJIBAKE.findall(text)) >= 2:
        found.append(f"text in a wrong encoding ({len(marks)} times, such as {marks[0]!r})")
    return found


def _runs(text: str) -> list[str]:
    for run in _RUN.finditer(text):
        size = run.end() - run.start()
        if run[1] not in _RULES or size >= _RULE_RUN:
            return [f"{run[1]!r} {size} times in a row"]
    return []


def _entropy(text: str) -> list[str]:
    plain = "".join(c for c in text.lower() if c not in _RULES and c != "|" and not c.isspace())
    if len(plain) < _ENTROPY_CHARACTERS:
        return []
    bits = entropy_bits(plain)
    if bits < _MIN_ENTROPY:
        return [f"hardly any different characters ({bits:.1f} bits each, at least {_MIN_ENTROPY})"]
    letters = [c for c in text if c.isalpha()]
    latin = sum(_alphabet(c) == "LATIN" for c in letters)
    if len(plain) >= _LONG and letters and latin > 0.9 * len(letters) and bits > _MAX_ENTROPY:
        return [f"characters without any order ({bits:.1f} bits each, at most {_MAX_ENTROPY})"]
    return []


def _scripts(text: str) -> list[str]:
    mixed = [w for w in re.findall(r"[^\W\d_]+", text) if len({_alphabet(c) for c in w} - {""}) > 1]
    if mixed:
        return [f"alphabets mixed inside a word: {mixed[0]!r}"]
    scripts = Counter(_alphabet(c) for c in text if c.isalpha())
    scripts.pop("", None)
    if len(scripts) >= _MANY_SCRIPTS:
        return [f"{len(scripts)} alphabets in one text: {', '.join(s.lower() for s in scripts)}"]
    return []


def _odd_spelling(text: str) -> list[str]:
    words = text.split()
    if len(words) < _ODD_WORDS:
        return []
    odd = [m.group() for m in _ODD.finditer(text)]
    if len(odd) >= _ODD_COUNT and len(odd) > _ODD_SHARE * len(words):
        return [f"{len(odd)} oddities of spelling in {len(words)} words, such as {odd[0]!r}"]
    return []


@cache
def _category(character: str) -> str:
    return unicodedata.category(character)


@cache
def _alphabet(character: str) -> str:
    """The alphabet of a letter by its Unicode name; empty for syllabaries and ideographs."""
    word = unicodedata.name(character, "").split(" ", 1)[0]
    return word if word in _ALPHABETS else ""
