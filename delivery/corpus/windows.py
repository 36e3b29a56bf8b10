"""Windows of held-out text, cut as a model sees text in serving."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from delivery.corpus.reading import documents
from delivery.corpus.render import TextEncoder, serving_prefix
from delivery.corpus.spec import Source, parse
from delivery.errors import DataError

if TYPE_CHECKING:
    from delivery.corpus.document import Document


def heldout_windows(
    spec: str | Sequence[str], tokenizer: TextEncoder, count: int, size: int, seed: int = 0
) -> Iterator[tuple[str, list[list[int]]]]:
    """Corpus label → at most `count` windows of at most `size` token ids; documents are concatenated.

    Every window begins as a served prompt does (with BOS if the tokenizer adds it). Without it, models
    that put attention on the first token (attention sinks) would be judged on input that they never see.
    Raises DataError `heldout-empty`.
    """
    prefix = serving_prefix(tokenizer)
    room = max(size - len(prefix), 1)
    for source in parse(spec):
        ids: list[int] = []
        for document in documents(source, "heldout", seed):
            ids += _encode(document, tokenizer, prefix)
            if len(ids) >= count * room:
                break
        made = [prefix + ids[at : at + room] for at in range(0, len(ids), room)][:count]
        made = [window for window in made if len(window) >= 2]
        if not made:
            raise _nothing_held_out(source)
        yield source.label, made


def check_heldout(spec: str | Sequence[str]) -> None:
    """Check that every local corpus has held-out text; datasets on the Hub are not checked.

    Raises DataError `heldout-empty`, and what reading a corpus raises.
    """
    for source in parse(spec):
        if source.kind != "named" and next(documents(source, "heldout"), None) is None:
            raise _nothing_held_out(source)


def _nothing_held_out(source: Source) -> DataError:
    return DataError(
        "heldout-empty",
        f"corpus {source.label} has no held-out text",
        why="a tenth of its documents is held out, and none of them has two tokens",
        hint="give a larger corpus",
    )


def _encode(document: Document, tokenizer: TextEncoder, prefix: list[int]) -> list[int]:
    if document.messages:
        ids = tokenizer.encode_chat(document.messages)
        return ids[len(prefix) :] if prefix and ids[: len(prefix)] == prefix else ids
    return tokenizer.encode(document.text, add_special_tokens=False)
