"""Layouts of checkpoints that no longer have a class of their own in transformers, one per file.

Such a checkpoint becomes one of a family with the same mathematics, so that every engine loads it
without remote code. A layout module has
    ARCHITECTURES: tuple[str, ...]          values of `architectures` that it reads
    config(hf) -> dict                      the canonical config
    pieces(hf, names) -> Iterator[Piece]    the canonical tensors, from the source's names
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from delivery.errors import DataError
from delivery.model.families import family_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delivery.model.families.family import Family


def layout_for(config: Mapping[str, Any]) -> Any | None:
    """The layout module of a config's architecture; None where its names are canonical already."""
    stated = config.get("architectures") or ()
    for module in _modules():
        if any(name in module.ARCHITECTURES for name in stated):
            return module
    return None


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint that can be used as it is.

    Raises as `family_for`; DataError `unknown-architecture` with the way out where it has to be converted.
    """
    if layout_for(config) is None:
        return family_for(config)
    raise DataError(
        "unknown-architecture",
        f"{config['architectures'][0]} has to be converted first",
        why="no class of its own is left for its layout; another one computes the same",
        hint="deliver convert --model PATH --out DIR",
    )


def source_architectures() -> tuple[str, ...]:
    """Architectures that `convert` reads beside those of `delivery.model.families`."""
    return tuple(sorted(name for module in _modules() for name in module.ARCHITECTURES))


def _modules() -> list[Any]:
    names = (m.name for m in iter_modules(__path__) if not m.name.startswith("_"))
    return [import_module(f"{__name__}.{name}") for name in names]
