"""Read the corpora of a spec: their documents, their held-out part, and a digest of what is read."""

from __future__ import annotations

import hashlib
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from delivery.artifact import canonical_json, hash_file
from delivery.corpus.builtin import builtin_documents, builtin_files
from delivery.corpus.document import Document, Split, split
from delivery.corpus.files import corpus_files, file_documents
from delivery.corpus.named import mirror_path, named_documents, revision
from delivery.corpus.spec import Source, parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Documents are put in the order of their content hashes, so that what is taken does not depend on
# the order of files; a longer corpus is ordered within its first so many documents.
_ORDERED_DOCUMENTS = 20_000


def load(spec: str | Sequence[str], part: Split = "calibration", seed: int = 0) -> Iterator[Document]:
    """The documents of every corpus of a spec, one corpus after the other, weights left aside.

    Raises what `parse` raises, DataError `corpus-format` or `corpus-empty`, EnvironmentLacking
    `corpus-unreachable`.
    """
    for source in parse(spec):
        yield from documents(source, part, seed)


def heldout(spec: str | Sequence[str], seed: int = 0) -> Iterator[Document]:
    """The documents of a spec that calibration never sees: a tenth, chosen by content hash."""
    return load(spec, "heldout", seed)


def documents(source: Source, part: Split = "calibration", seed: int = 0) -> Iterator[Document]:
    """One corpus in an order that depends on its content and the seed only."""
    stream = split(_raw(source), part)
    head = list(islice(stream, _ORDERED_DOCUMENTS))
    head.sort(key=lambda d: hashlib.sha256(f"{seed}:{d.content_hash}".encode()).digest())
    yield from head
    yield from stream


def digest(spec: str | Sequence[str]) -> dict[str, str]:
    """Label → SHA-256 of everything that is read of a source (file contents, not places or times).

    A repeated label gets a prime ('). A named set on the Hub is known by its repository
    and part only.
    """
    found: dict[str, str] = {}
    for source in parse(spec):
        label = source.label
        while label in found:
            label += "'"
        found[label] = _digest(source)
    return found


def _raw(source: Source) -> Iterator[Document]:
    if source.kind == "builtin":
        return builtin_documents(source.name)
    if source.kind == "path":
        return file_documents(Path(source.name), source.label)
    mirror = mirror_path(source.name)
    return named_documents(source.name) if mirror is None else file_documents(mirror, source.label)


def _digest(source: Source) -> str:
    if source.kind == "builtin":
        files = builtin_files(source.name)
    else:
        path = Path(source.name) if source.kind == "path" else mirror_path(source.name)
        if path is None:
            return hashlib.sha256(revision(source.name).encode()).hexdigest()
        files = corpus_files(path)
    contents = sorted(hash_file(f).sha256 for f in files)
    return hashlib.sha256(canonical_json(contents).encode()).hexdigest()
