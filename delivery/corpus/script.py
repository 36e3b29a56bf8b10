"""Writing systems of a text, by characters: a model calibrated in the wrong one loses quality."""

from __future__ import annotations

import unicodedata
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PREFIXES = {
    "CJK": "Han",
    "HIRAGANA": "Kana",
    "KATAKANA": "Kana",
    "HANGUL": "Hangul",
    "LATIN": "Latin",
    "CYRILLIC": "Cyrillic",
    "GREEK": "Greek",
    "ARABIC": "Arabic",
    "HEBREW": "Hebrew",
    "DEVANAGARI": "Devanagari",
    "BENGALI": "Bengali",
    "TAMIL": "Tamil",
    "THAI": "Thai",
    "ARMENIAN": "Armenian",
    "GEORGIAN": "Georgian",
}

# A script is a language of the model when this share of the letters in its vocabulary belongs to
# it; Llama 3 has 3 to 4 % Han letters and is not called Chinese, Qwen and InternLM have over 10 %.
MODEL_SHARE = 0.08
# Below this share of a corpus a script is called absent.
CORPUS_SHARE = 0.05


def script_shares(texts: Iterable[str]) -> dict[str, float]:
    """Share of the letters of each script, largest first; digits, marks and blanks do not count."""
    letters: Counter[str] = Counter()
    for text in texts:
        letters.update(text)
    scripts: Counter[str] = Counter()
    for letter, count in letters.items():
        if name := _script(letter):
            scripts[name] += count
    total = sum(scripts.values())
    return {name: count / total for name, count in scripts.most_common()}


def uncovered_scripts(model: Mapping[str, float], corpus: Mapping[str, float]) -> list[str]:
    """Warnings, one for each script that the model writes and the calibration text hardly holds.

    model: shares in the texts of the vocabulary. corpus: shares in the calibration text.
    """
    found = ", ".join(f"{name} {share:.0%}" for name, share in list(corpus.items())[:3]) or "no letters"
    return [
        f"{share:.0%} of the letters in the model's vocabulary are {name}, but only "
        f"{corpus.get(name, 0.0):.0%} of those in the calibration text ({found}): calibrate on {name} text, "
        "or expect it to suffer"
        for name, share in model.items()
        if share >= MODEL_SHARE and corpus.get(name, 0.0) < CORPUS_SHARE
    ]


@cache
def _script(letter: str) -> str:
    if not letter.isalpha():
        return ""
    word = unicodedata.name(letter, "").split(" ", 1)[0]
    return _PREFIXES.get(word, "other")
