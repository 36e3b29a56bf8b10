"""Whether a checkpoint has every tensor that its architecture needs, by names alone. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from delivery.errors import DataError
from delivery.model.families import family_for, family_named
from delivery.model.shapes import shape_disagrees, stored_shapes, vocabulary_disagrees
from delivery.model.stored import holds, stored_part

if TYPE_CHECKING:
    from delivery.checkpoint.outline import Outline


class _Present:
    """Names as what knows of stored tensors."""

    def __init__(self, names: Collection[str]) -> None:
        self.has = frozenset(names).__contains__


def check_complete(config: Mapping[str, Any], names: Collection[str]) -> None:
    """Raises DataError `missing-weight` with the first tensor that is not among `names`.

    This detects a wrong `architectures` before a weight is read.
    """
    model = family_for(config).config(config)
    family = family_named(model.family)
    present = _Present(names)
    root = next((r for r in family.roots if holds(present, f"{r}.{family.embed}")), None)
    if root is None:
        raise _missing(f"{family.roots[0]}.{family.embed}.weight", config)
    wanted = [f"{root}.{family.norm}"]
    for layer in range(model.num_layers):
        for part in family.linears(model, layer).values():
            here = f"{root}.{stored_part(present, root, part).prefix}"
            if not holds(present, here) and not present.has(here):
                raise _missing(f"{root}.{part.prefix}.weight", config)
        more = (*family.norms(model, layer).values(), *family.tensors(model, layer).values())
        wanted += [f"{root}.{name}" for name in more]
    for name in wanted:
        if not present.has(name):
            raise _missing(name, config)


def check_shapes(outline: Outline) -> None:
    """Raises DataError `config-invalid` where the embedding is not as wide as the config says, and
    `shape-disagrees` for the first other weight whose shape does not follow from the config."""
    model = family_for(outline.config).config(outline.config)
    family = family_named(model.family)
    for root in family.roots:
        name = f"{root}.{family.embed}.weight"
        if outline.has(name) and (found := outline.shape(name)[-1]) != model.hidden_size:
            raise DataError(
                "config-invalid",
                "config.json: hidden_size is not that of the weights",
                why=f"it is {model.hidden_size}, {name} has rows of {found}",
                hint="take config.json from the model's own repository",
            )
        if not outline.has(name):
            continue
        if (rows := outline.shape(name)[0]) < model.vocab_size:
            raise vocabulary_disagrees(name, rows, model.vocab_size)
        for stored, wanted in stored_shapes(family, model, root, outline.has):
            if (shape := outline.shape(stored)) != wanted:
                raise shape_disagrees(stored, shape, wanted)
        for head in family.heads:
            stored = f"{head}.weight"
            if outline.has(stored) and (rows := outline.shape(stored)[0]) < model.vocab_size:
                raise vocabulary_disagrees(stored, rows, model.vocab_size)


def _missing(name: str, config: Mapping[str, Any]) -> DataError:
    return DataError(
        "missing-weight",
        f"the checkpoint has no tensor {name}",
        why=f"a {config['architectures'][0]}, which its config says it is, needs it",
        hint="deliver inspect on the checkpoint; is its `architectures` right?",
    )
