"""Read a knowledge base: Markdown, HTML, CSV, JSON lines and plain text become documents.

A section under a heading is a document. A heading that asks a question, and a row with a question and
an answer, becomes a conversation, so that it is rendered through the model's chat template.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path

from delivery.corpus.document import Document
from delivery.corpus.files import file_documents
from delivery.corpus.passages import PASSAGE_CHARS, passages
from delivery.errors import DataError

READABLE = (".md", ".markdown", ".html", ".htm", ".csv", ".jsonl", ".txt", ".parquet")

_HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t]*#*$")
_FENCE = re.compile(r"^(```|~~~)")
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_QUESTIONS = ("question", "q", "prompt", "instruction", "title", "subject")
_ANSWERS = ("answer", "a", "response", "output", "body", "content")
_TEXTS = ("text", "content", "body")
_QUESTION_MARKS = ("?", "？", "؟")


def knowledge_files(source: Path) -> tuple[Path, ...]:
    """The readable files of a source, in a fixed order. Raises DataError `corpus-missing`, `corpus-empty`."""
    if not source.exists():
        raise DataError("corpus-missing", f"there is no {source}", hint="check the path")
    if source.is_file():
        found = [source] if source.suffix.lower() in READABLE else []
    else:
        found = sorted(p for p in source.rglob("*") if p.suffix.lower() in READABLE and p.is_file())
    if not found:
        raise DataError(
            "corpus-empty",
            f"{source} holds nothing that can be read",
            why=f"expected names that end in {', '.join(READABLE)}",
            hint="export the knowledge base as Markdown, HTML, CSV or JSON lines",
        )
    return tuple(found)


def knowledge_documents(file: Path) -> Iterator[Document]:
    """The documents of one file. Raises DataError `corpus-format`."""
    match file.suffix.lower():
        case ".md" | ".markdown":
            yield from _sections(_markdown(_text(file)), file.name)
        case ".html" | ".htm":
            yield from _sections(_html(_text(file)), file.name)
        case ".csv":
            yield from _rows(file)
        case _:
            yield from file_documents(file, file.name)


Section = tuple[str, str]
"""(heading, body)."""


def _sections(sections: Iterator[Section], corpus: str) -> Iterator[Document]:
    for heading, body in sections:
        body = body.strip()
        if not body:
            continue
        if heading.endswith(_QUESTION_MARKS):
            yield _conversation(corpus, heading, body)
        elif len(body) <= 2 * PASSAGE_CHARS:
            yield Document(corpus, f"{heading}\n\n{body}" if heading else body)
        else:
            for passage in passages(body):
                yield Document(corpus, f"{heading}\n\n{passage}" if heading else passage)


def _conversation(corpus: str, question: str, answer: str) -> Document:
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Document(corpus, messages=messages)


def _markdown(text: str) -> Iterator[Section]:
    heading, fenced = "", False
    lines: list[str] = []
    for line in _FRONT_MATTER.sub("", text).splitlines():
        if _FENCE.match(line):
            fenced = not fenced
        found = None if fenced else _HEADING.match(line)
        if found:
            yield heading, "\n".join(lines)
            heading, lines = found[1], []
        else:
            lines.append(line)
    yield heading, "\n".join(lines)


def _html(text: str) -> Iterator[Section]:
    parser = _Page()
    parser.feed(text)
    parser.close()
    yield from parser.sections()


class _Page(HTMLParser):
    """Headings and the text under them, without scripts, styles and navigation."""

    _SKIPPED = frozenset(
        {"script", "style", "nav", "header", "footer", "noscript", "template", "svg", "form"}
    )
    _BLOCKS = frozenset(
        {"p", "div", "li", "tr", "pre", "blockquote", "section", "article", "table", "dd", "dt"}
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._found: list[tuple[list[str], list[str]]] = [([], [])]
        self._skip = 0
        self._in_heading = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in self._SKIPPED:
            self._skip += 1
        elif re.fullmatch("h[1-6]", tag):
            self._in_heading = True
            self._found.append(([], []))
        elif tag in self._BLOCKS or tag == "br":
            self._found[-1][1].append("\n\n" if tag in ("p", "div", "section", "article") else "\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._SKIPPED:
            self._skip = max(0, self._skip - 1)
        elif re.fullmatch("h[1-6]", tag):
            self._in_heading = False

    def handle_data(self, data: str) -> None:
        if not self._skip:
            self._found[-1][0 if self._in_heading else 1].append(data)

    def sections(self) -> Iterator[Section]:
        for heading, body in self._found:
            lines = (" ".join(line.split()) for line in "".join(body).split("\n"))
            text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
            yield " ".join("".join(heading).split()), text


def _rows(file: Path) -> Iterator[Document]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        try:
            reader = csv.DictReader(stream)
            names = {(n or "").strip().lower(): n for n in reader.fieldnames or ()}
            question, answer = (_first(names, wanted) for wanted in (_QUESTIONS, _ANSWERS))
            text = _first(names, _TEXTS)
            for row in reader:
                if question and answer and row[question] and row[answer]:
                    yield _conversation(file.name, row[question].strip(), row[answer].strip())
                elif text and not (question and answer):
                    yield Document(file.name, (row[text] or "").strip())
                else:
                    pairs = (
                        (k, v) for k, v in row.items() if isinstance(k, str) and isinstance(v, str) and v
                    )
                    yield Document(file.name, "\n".join(f"{k}: {v.strip()}" for k, v in pairs))
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError("corpus-format", f"{file} cannot be read as CSV", why=str(error)) from error


def _first(names: Mapping[str, str], wanted: tuple[str, ...]) -> str | None:
    return next((names[w] for w in wanted if w in names), None)


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            "corpus-format", f"{file} is not UTF-8 text", why=str(error), hint=f"iconv -t utf-8 {file}"
        ) from error
