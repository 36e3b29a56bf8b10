"""Build a corpus from a knowledge base: read, drop duplicates, split, write.

calibration.jsonl and heldout.jsonl go into one folder, which is itself a corpus: `--corpus DIR`
calibrates on the first and evaluates on the second, since both are split by content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from delivery.corpus.document import Document, is_held_out
from delivery.corpus.knowledge import knowledge_documents, knowledge_files
from delivery.corpus.near_duplicates import NearDuplicates
from delivery.errors import DataError, UsageError

CALIBRATION = "calibration.jsonl"
HELD_OUT = "heldout.jsonl"
_SHORTEST_CHARS = 20


@dataclass(slots=True)
class Built:
    """Counts of what was read and dropped. `duplicates` differ in white space at most."""

    files: int = 0
    read: int = 0
    too_short: int = 0
    duplicates: int = 0
    near_duplicates: int = 0
    conversations: int = 0
    calibration: int = 0
    held_out: int = 0

    def row(self) -> dict[str, int]:
        return asdict(self)


def build(
    sources: Iterable[Path], out: Path, similarity: float = 0.8, after: Callable[[Path], None] | None = None
) -> Built:
    """Read every source and write the corpus into `out`, which must be new or empty.

    similarity: share of common word shingles from which two documents count as one, so that what is
    held out has no twin in what is calibrated on. after: called with each file that was read.
    Raises DataError `corpus-missing`, `corpus-empty`, `corpus-format`, UsageError `out-exists`,
    `similarity`.
    """
    if not 0 < similarity <= 1:
        raise UsageError("similarity", f"--similarity is {similarity:g}", why="expected above 0 and up to 1")
    if out.exists() and any(out.iterdir()):
        raise UsageError("out-exists", f"{out} is not empty", hint="give another --out")
    files = [file for source in sources for file in knowledge_files(source)]
    built, kept = Built(files=len(files)), NearDuplicates(similarity)
    hashes: set[str] = set()
    parts: dict[str, list[str]] = {CALIBRATION: [], HELD_OUT: []}
    for file in files:
        for document in _distinct(knowledge_documents(file), hashes, kept, built):
            parts[HELD_OUT if is_held_out(document) else CALIBRATION].append(_line(document))
        if after is not None:
            after(file)
    built.calibration, built.held_out = len(parts[CALIBRATION]), len(parts[HELD_OUT])
    if not hashes:
        raise DataError(
            "corpus-empty",
            "the sources contain no usable documents",
            why=f"{built.read} documents read, {built.too_short} under {_SHORTEST_CHARS} characters",
            hint="check that the files hold text",
        )
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in parts.items():
        (out / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    (out / "build.json").write_text(json.dumps(built.row(), indent=1) + "\n", "utf-8")
    return built


def _distinct(
    documents: Iterable[Document], hashes: set[str], kept: NearDuplicates, built: Built
) -> Iterator[Document]:
    """Documents that are long enough and new to `hashes` and `kept`, which grow; counts all in `built`."""
    for document in documents:
        built.read += 1
        if len(document.plain.strip()) < _SHORTEST_CHARS:
            built.too_short += 1
        elif document.content_hash in hashes:
            built.duplicates += 1
        elif kept.seen(document.plain):
            built.near_duplicates += 1
        else:
            hashes.add(document.content_hash)
            built.conversations += bool(document.messages)
            yield document


def _line(document: Document) -> str:
    row = {"messages": list(document.messages)} if document.messages else {"text": document.text}
    return json.dumps(row, ensure_ascii=False)
