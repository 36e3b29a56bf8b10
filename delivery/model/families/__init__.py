"""Families of checkpoints, one per file; a file is found by its name and holds a `FAMILY`."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from delivery.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delivery.model.families.family import Family

__all__ = ["architectures", "families", "family_for", "family_named"]


@cache
def families() -> dict[str, Family]:
    """Every family by its name."""
    modules = (import_module(f"{__name__}.{m.name}") for m in iter_modules(__path__))
    return {module.FAMILY.name: module.FAMILY for module in modules if hasattr(module, "FAMILY")}


@cache
def architectures() -> dict[str, Family]:
    """What `architectures` in a config.json may say, and the family that each belongs to."""
    return {name: family for family in families().values() for name in family.architectures}


def family_named(name: str) -> Family:
    """The family that a ModelConfig says it is of."""
    return families()[name]


def family_for(hf_config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint, from its config's `architectures` and nothing else.

    Raises DataError `no-architecture` or `unknown-architecture`, naming what is supported.
    """
    stated = hf_config.get("architectures")
    if not isinstance(stated, list) or not stated or not all(isinstance(name, str) for name in stated):
        raise DataError(
            "no-architecture",
            "config.json does not say what the model is",
            why=f"expected `architectures`, a list with one name, got {stated!r}",
            hint=f"supported: {', '.join(sorted(architectures()))}",
        )
    for name in stated:
        if name in architectures():
            return architectures()[name]
    raise DataError(
        "unknown-architecture",
        f"architecture {stated[0]} is not supported",
        why=f"supported: {', '.join(sorted(architectures()))}",
        hint="add delivery/model/families/<name>.py (CONTRIBUTING.md)",
    )
