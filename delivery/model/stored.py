"""Where a checkpoint stores the language model and its parts, found by the names of its tensors. No torch."""

from __future__ import annotations

from typing import Protocol

from delivery.errors import DataError
from delivery.model.families.family import Family, Part

_SUFFIXES = ("weight", "qweight", "weight_packed")


class Names(Protocol):
    """What knows which tensors a checkpoint holds."""

    def has(self, name: str) -> bool: ...


def find_root(source: Names, family: Family) -> str:
    """The prefix of the text model's tensors, found by the embedding table.

    Raises DataError `missing-weight`.
    """
    for root in family.roots:
        if holds(source, f"{root}.{family.embed}"):
            return root
    raise DataError(
        "missing-weight",
        f"the checkpoint has no embedding table of a {family.name} model",
        why=f"looked for {', '.join(f'{root}.{family.embed}.weight' for root in family.roots)}",
        hint="deliver inspect on the checkpoint; is its `architectures` right?",
    )


def stored_part(source: Names, root: str, part: Part) -> Part:
    """The part, or its alternative where only that is stored."""
    other = part.alternative
    if other is None or holds(source, f"{root}.{part.prefix}"):
        return part
    there = f"{root}.{other.prefix}"
    return other if source.has(there) or holds(source, there) else part


def holds(source: Names, prefix: str) -> bool:
    """Whether a linear layer or embedding is stored under `prefix`, quantised or not."""
    return any(source.has(f"{prefix}.{suffix}") for suffix in _SUFFIXES)
