"""Documents from local files: .txt, .jsonl and .parquet, or a folder of these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.corpus.document import Document
from delivery.corpus.passages import passages
from delivery.errors import DataError, EnvironmentLacking

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SUFFIXES = (".txt", ".jsonl", ".parquet")
_ROWS = 1024


def corpus_files(path: Path) -> tuple[Path, ...]:
    """The files of a corpus in a fixed order. Raises DataError `corpus-empty` or `corpus-format`."""
    if path.is_file():
        if path.suffix.lower() not in _SUFFIXES:
            raise DataError(
                "corpus-format",
                f"{path} cannot be read as a corpus",
                why=f"expected a name that ends in {', '.join(_SUFFIXES)}",
                hint="convert it to JSON lines with a field 'text' or 'messages'",
            )
        return (path,)
    found = (p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
    files = tuple(sorted(found, key=lambda p: p.relative_to(path).as_posix()))
    if not files:
        raise DataError(
            "corpus-empty",
            f"{path} holds no corpus files",
            why=f"expected files that end in {', '.join(_SUFFIXES)}",
            hint="deliver calibrate --corpus legal,technical",
        )
    return files


def file_documents(path: Path, label: str) -> Iterator[Document]:
    """The documents of a file or folder, streamed.

    A .txt is cut into passages; a line of .jsonl or a row of .parquet is a document with a field
    `text` (a string) or `messages` (a list of {role, content}).
    """
    for file in corpus_files(path):
        match file.suffix.lower():
            case ".txt":
                for passage in passages(_text(file)):
                    yield Document(label, passage)
            case ".jsonl":
                yield from _json_lines(file, label)
            case _:
                yield from _parquet(file, label)


def _not_utf8(file: Path, error: UnicodeDecodeError) -> DataError:
    return DataError(
        "corpus-format",
        f"{file} is not UTF-8 text",
        why=f"byte {error.object[error.start]:#04x} cannot be decoded",
        hint=f"iconv -t utf-8 {file}",
    )


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(file, error) from error


def _lines(file: Path) -> Iterator[str]:
    # Not str.splitlines: it also cuts at U+2028 and its kin, which JSON strings may hold.
    with file.open(encoding="utf-8-sig", newline="\n") as stream:
        try:
            yield from stream
        except UnicodeDecodeError as error:
            raise _not_utf8(file, error) from error


def _json_lines(file: Path, label: str) -> Iterator[Document]:
    for number, line in enumerate(_lines(file), 1):
        if line.strip():
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError("corpus-format", f"{where} is not JSON", why=str(error)) from error
            yield _document(row, where, label)


def _parquet(file: Path, label: str) -> Iterator[Document]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise EnvironmentLacking(
            "corpus-reader",
            f"{file} cannot be read here",
            why="the Python package 'pyarrow' is not installed",
            hint="pip install pyarrow; or write the corpus as .jsonl",
        ) from error
    number = 0
    try:
        table = parquet.ParquetFile(file)
        wanted = [n for n in ("text", "messages") if n in table.schema_arrow.names]
        for batch in table.iter_batches(batch_size=_ROWS, columns=wanted):
            for row in batch.to_pylist():
                yield _document(row, f"{file}, row {number}", label)
                number += 1
    except (ValueError, OSError) as error:  # what pyarrow raises
        raise DataError("corpus-format", f"{file} cannot be read as Parquet", why=str(error)) from error


def _document(row: Any, where: str, label: str) -> Document:
    if isinstance(row, dict):
        messages = row.get("messages")
        if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
            return _valid(Document(label, messages=tuple(messages)), where)
        if isinstance(text := row.get("text"), str):
            return _valid(Document(label, text), where)
    found = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
    raise DataError(
        "corpus-format",
        f"{where} holds no document",
        why=f"expected a string 'text' or a list 'messages' of role and content, got {found or 'nothing'}",
        hint='{"text": "..."} or {"messages": [{"role": "user", "content": "..."}]}',
    )


def _valid(document: Document, where: str) -> Document:
    """The document, if its text can be written as UTF-8: JSON can escape half of a surrogate pair."""
    try:
        document.plain.encode()
    except UnicodeEncodeError as error:
        why = f"character {error.start} is half of a surrogate pair"
        hint = "replace it by \\ufffd"
        raise DataError("corpus-format", f"{where} is not valid Unicode", why=why, hint=hint) from error
    return document


def _is_message(value: Mapping[str, Any] | Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value
