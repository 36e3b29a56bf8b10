"""Document: one piece of text, and the split into calibration and held-out text."""

from __future__ import annotations

import hashlib
import unicodedata
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Split = Literal["calibration", "heldout", "all"]

HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text, or a conversation that is rendered through the model's chat template.

    corpus: name of the corpus as the user wrote it. messages: OpenAI-style mappings with `role` and
    `content`; empty for plain text.
    """

    corpus: str
    text: str = ""
    messages: tuple[Mapping[str, object], ...] = ()

    @property
    def plain(self) -> str:
        """All the words, without a template: what hashes, script shares and filters look at."""
        if not self.messages:
            return self.text
        return "\n".join(str(m.get("content", "")) for m in self.messages)

    @property
    def content_hash(self) -> str:
        """SHA-256 of the text in NFC with runs of white space folded: stable across line wrapping."""
        folded = " ".join(unicodedata.normalize("NFC", self.plain).split())
        return hashlib.sha256(folded.encode()).hexdigest()


def is_held_out(document: Document) -> bool:
    """Whether a document belongs to the held-out tenth: decided by its content alone.

    The same text is held out on every machine, in every corpus and at every position, so a text that
    was calibrated on is never evaluated on.
    """
    return int(document.content_hash[:8], 16) < HELD_OUT_SHARE * 0x100000000


def split(documents: Iterable[Document], wanted: Split) -> Iterator[Document]:
    """The calibration or the held-out part of a corpus; repeated texts are dropped.

    A corpus too small to have a document in the held-out tenth gives up the one with the lowest
    hash, as long as it has two.
    """
    distinct = _distinct(documents)
    if wanted == "all":
        yield from distinct
        return
    waiting: list[Document] = []
    found = False
    for document in distinct:
        if is_held_out(document):
            found = True
            if wanted == "heldout":
                yield document
                yield from (d for d in distinct if is_held_out(d))
                return
            break
        waiting.append(document)
    if not found and len(waiting) > 1:
        last = min(waiting, key=lambda d: d.content_hash)
        waiting = [last] if wanted == "heldout" else [d for d in waiting if d is not last]
    elif wanted == "heldout":
        return
    yield from chain(waiting, (d for d in distinct if not is_held_out(d)))


def _distinct(documents: Iterable[Document]) -> Iterator[Document]:
    seen: set[str] = set()
    for document in documents:
        key = document.content_hash
        if key not in seen and document.plain.strip():
            seen.add(key)
            yield document
