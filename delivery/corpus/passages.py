"""Cut long text into passages: whole paragraphs, about a page each, repeated paragraphs dropped."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PASSAGE_CHARS = 2000
_MINIMUM_CHARS = 200
_BLANK_LINE = re.compile(r"\n[ \t]*\n")


def passages(text: str, seen: set[str] | None = None) -> Iterator[str]:
    """Passages of about `PASSAGE_CHARS` characters, cut at blank lines (or hard where there is none).

    seen: keys of paragraphs met before; a paragraph whose letters and digits are there already is
    left out, and new ones are added. Without it nothing is left out.
    """
    waiting: list[str] = []
    size = 0
    for paragraph in _paragraphs(text, seen):
        if size and size + len(paragraph) > PASSAGE_CHARS:
            yield "\n\n".join(waiting)
            waiting, size = [], 0
        waiting.append(paragraph)
        size += len(paragraph)
    # A short last passage is kept only where it is all there is of a text that nobody filtered.
    if size >= _MINIMUM_CHARS or (size and seen is None):
        yield "\n\n".join(waiting)


def _paragraphs(text: str, seen: set[str] | None) -> Iterator[str]:
    for block in _BLANK_LINE.split(text):
        paragraph = block.strip("\n")
        if not paragraph.strip():
            continue
        if seen is not None:
            key = "".join(c for c in paragraph.lower() if c.isalnum())
            if key in seen or not key:
                continue
            seen.add(key)
        for start in range(0, len(paragraph), 2 * PASSAGE_CHARS):
            yield paragraph[start : start + 2 * PASSAGE_CHARS]
