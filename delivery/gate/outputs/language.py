"""Which language a text is in: by script, and among Latin-script languages by their commonest words."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import cache

_WORDS = {
    "en": "the of and to in is that it was for on are as with his they be at have this from by not you we he",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an",
    "fr": "le de la et les des en un une du est que dans qui pour pas sur au par plus ne se ce il sont avec",
    "es": "de la que el en y los se del las un por con no una su para es al lo como más pero sus le ya o",
    "it": "di e il la che in un per è non una sono con del della le da si al dei gli nel come anche più lo",
    "pt": "de a o que e do da em um para é com não uma os no se na por mais as dos como mas foi ao ele das",
    "nl": "de het een en van in is dat op te zijn met voor niet aan er om ook als dan maar bij nog uit ze",
}
# Words of other languages that English text is full of say nothing.
_ENGLISH_TOO = "a an as do no on in is me we he was die so am also plus son per come al"
_SHARED = frozenset(_ENGLISH_TOO.split())
_COMMON = {
    language: frozenset(words.split()) - (frozenset() if language == "en" else _SHARED)
    for language, words in _WORDS.items()
}
_BY_SCRIPT = {
    "HANGUL": "ko",
    "CYRILLIC": "ru",
    "GREEK": "el",
    "ARABIC": "ar",
    "HEBREW": "he",
    "THAI": "th",
    "DEVANAGARI": "hi",
}
_KANA_SHARE = 0.05
_MAIN_SHARE = 0.5
_CLEAR_HITS, _COMMON_SHARE = 2, 0.06
LANGUAGES = (*_COMMON, "zh", "ja", *_BY_SCRIPT.values())


def language_of(text: str) -> str:
    """An ISO 639-1 code, or "" when the text is too short or mixed to say."""
    scripts = Counter(script for c in text if c.isalpha() and (script := _script(c)))
    total = sum(scripts.values())
    if not total:
        return ""
    kana, han = scripts["KANA"], scripts["CJK"]
    if (kana + han) / total > _MAIN_SHARE:
        return "ja" if kana / total > _KANA_SHARE else "zh"
    script, count = scripts.most_common(1)[0]
    if count / total <= _MAIN_SHARE:
        return ""
    return _latin(text) if script == "LATIN" else _BY_SCRIPT.get(script, "")


def _latin(text: str) -> str:
    words = re.findall(r"[^\W\d_]+", text.lower())
    scores = {language: sum(w in common for w in words) for language, common in _COMMON.items()}
    best, second = sorted(scores, key=lambda language: scores[language], reverse=True)[:2]
    # A handful of words may hold no common one ("Paris."), or one that several languages share ("a").
    clear = scores[best] >= _CLEAR_HITS and scores[best] > scores[second]
    return best if clear and scores[best] >= _COMMON_SHARE * len(words) else ""


@cache
def _script(letter: str) -> str:
    word = unicodedata.name(letter, "").split(" ", 1)[0]
    return "KANA" if word in ("HIRAGANA", "KATAKANA") else word
