"""Which corpora: `legal`, `technical`, a named set, a file or a folder, weighted with `=`.

`legal,technical` is an even mix; `faq.jsonl=3,legal` takes three tokens of faq.jsonl to one of legal.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from delivery.corpus.builtin import builtin_names
from delivery.corpus.named import named_sets
from delivery.errors import DataError, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class Source:
    """One corpus of a mix. weight: its share of the tokens, relative to the other sources'."""

    name: str
    kind: Literal["builtin", "named", "path"]
    weight: float = 1.0

    @property
    def label(self) -> str:
        """A short name for reports: no folders."""
        return self.name if self.kind != "path" else Path(self.name).resolve().name


def parse(spec: str | Sequence[str]) -> tuple[Source, ...]:
    """The sources of a spec: comma-separated, or a sequence of such.

    Raises UsageError `corpus-spec` for an empty one, a bad weight or two corpora of one name, DataError
    `corpus-missing` for a path that does not exist.
    """
    parts = [p.strip() for s in ([spec] if isinstance(spec, str) else spec) for p in s.split(",")]
    parts = [p for p in parts if p]
    if not parts:
        raise UsageError("corpus-spec", "no corpus is named", hint="--corpus legal,technical")
    sources = tuple(_source(p) for p in parts)
    labels = [s.label for s in sources]
    if twice := next((n for n in labels if labels.count(n) > 1), None):
        named = [s.name for s in sources if s.label == twice]
        raise UsageError(
            "corpus-spec",
            f"corpus {twice!r} is named twice",
            why=f"reports could not tell {' and '.join(named)} apart",
            hint=f"give {twice}=WEIGHT once" if len(set(named)) == 1 else "rename one of them",
        )
    return sources


def bare(spec: str) -> str:
    """The spec without the folders around its files, for what records which corpora were read.

    What cannot be parsed stays as it is.
    """
    try:
        sources = parse(spec)
    except (UsageError, DataError):
        return spec
    return ",".join(s.label if s.weight == 1 else f"{s.label}={s.weight:g}" for s in sources)


def _source(part: str) -> Source:
    name, equals, number = part.rpartition("=")
    weight = 1.0
    if equals:
        try:
            weight = float(number)
        except ValueError:
            name = part
        if not 0 < weight < float("inf"):
            raise UsageError(
                "corpus-spec",
                f"the weight of corpus {name!r} is {number}",
                why="expected a number above 0",
                hint=f"--corpus {name}=1",
            )
    else:
        name = part
    if name in builtin_names():
        return Source(name, "builtin", weight)
    if name in named_sets():
        return Source(name, "named", weight)
    path = Path(name)
    if not path.exists():
        known = (*builtin_names(), *named_sets())
        looks_like_path = "/" in name or path.suffix in SUFFIXES
        raise DataError(
            "corpus-missing",
            f"there is no corpus {name!r}",
            why="it is neither an existing file or folder nor a known name",
            hint="check the path" if looks_like_path else did_you_mean(name, known),
        )
    return Source(name, "path", weight)
