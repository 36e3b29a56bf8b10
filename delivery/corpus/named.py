"""Named public sets: from a local mirror, or through the `datasets` package where it is installed.

`$DELIVER_CORPORA` names the mirror: a folder with `<name>.jsonl`, `.txt`, `.parquet` or `<name>/`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.corpus.document import Document
from delivery.errors import EnvironmentLacking

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MIRROR_VARIABLE = "DELIVER_CORPORA"


@dataclass(frozen=True, slots=True)
class NamedSet:
    """Where a set lives on the Hugging Face Hub, and which fields hold its text."""

    repository: str
    split: str
    fields: tuple[str, ...]
    configuration: str | None = None
    files: str | None = None


_SETS = {
    "wikitext2": NamedSet("Salesforce/wikitext", "train", ("text",), "wikitext-2-raw-v1"),
    "c4": NamedSet("allenai/c4", "train", ("text",), files="en/c4-train.00000-of-01024.json.gz"),
    "pileval": NamedSet("mit-han-lab/pile-val-backup", "validation", ("text",)),
    "gsm8k": NamedSet("openai/gsm8k", "train", ("question", "answer"), "main"),
    "neuralmagic_calibration": NamedSet("neuralmagic/LLM_compression_calibration", "train", ("text",)),
    "open-platypus": NamedSet("garage-bAInd/Open-Platypus", "train", ("instruction", "output")),
    "openwebtext": NamedSet("Skylion007/openwebtext", "train", ("text",)),
}


def named_sets() -> tuple[str, ...]:
    """Names of the sets that are known by name."""
    return tuple(_SETS)


def mirror_path(name: str) -> Path | None:
    """The set's file or folder in the local mirror; None where there is none."""
    root = os.environ.get(MIRROR_VARIABLE)
    if not root:
        return None
    candidates = (Path(root) / f"{name}{suffix}" for suffix in ("", ".jsonl", ".parquet", ".txt"))
    return next((p for p in candidates if p.exists()), None)


def named_documents(name: str) -> Iterator[Document]:
    """The documents of a named set, streamed from the Hub.

    Raises EnvironmentLacking `corpus-unreachable` when `datasets` is missing or the Hub does not answer.
    """
    wanted = _SETS[name]
    if find_spec("datasets") is None:
        raise _unreachable(name, "the Python package 'datasets' is not installed")
    import datasets

    try:
        rows = datasets.load_dataset(
            wanted.repository,
            wanted.configuration,
            split=wanted.split,
            streaming=True,
            data_files={wanted.split: wanted.files} if wanted.files else None,
        )
        iterator = iter(rows)
        first = next(iterator, None)
    except (OSError, ValueError, RuntimeError) as error:
        # Every failure of the Hub client (connection, HTTP status, offline mode) is one of these.
        raise _unreachable(name, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    if first is not None:
        yield from _rows(name, first, iterator, wanted.fields)


def revision(name: str) -> str:
    """What a digest can say of a set on the Hub: the repository, its part and its fields."""
    wanted = _SETS[name]
    return "|".join(str(v) for v in (wanted.repository, wanted.configuration, wanted.split, wanted.files))


def _rows(
    name: str, first: Mapping[str, Any], rest: Iterator[Mapping[str, Any]], fields: tuple[str, ...]
) -> Iterator[Document]:
    row: Mapping[str, Any] | None = first
    while row is not None:
        yield Document(name, "\n".join(str(row[f]) for f in fields if row.get(f)))
        row = next(rest, None)


def _unreachable(name: str, why: str) -> EnvironmentLacking:
    return EnvironmentLacking(
        "corpus-unreachable",
        f"corpus {name!r} cannot be read",
        why=why,
        hint=f"--corpus legal,technical works offline; or --corpus FILE.jsonl; or put {name}.jsonl into a "
        f"folder and set {MIRROR_VARIABLE} to it; or pip install datasets",
    )
