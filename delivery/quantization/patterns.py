"""Patterns that name layers, as `--recipe` and `--skip` take them. No torch: they are checked at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from delivery.errors import UsageError, did_you_mean
from delivery.model.families import family_for, family_named
from delivery.model.stored import find_root
from delivery.quantization.schemes import scheme_names

if TYPE_CHECKING:
    from delivery.checkpoint.outline import Outline

SKIP = "skip"


def parse_recipe(text: str) -> dict[str, str]:
    """`*.down_proj=w8a16,*.layers.0.*=skip` → pattern → scheme. Raises UsageError `recipe`."""
    recipe = {}
    for part in parse_patterns(text):
        pattern, equals, scheme = part.rpartition("=")
        if not equals or not pattern or scheme not in (*scheme_names(), SKIP):
            raise UsageError(
                "recipe",
                f"{part!r} in the recipe is not understood",
                why="expected PATTERN=SCHEME or PATTERN=skip",
                hint=did_you_mean(scheme, (*scheme_names(), SKIP)),
            )
        recipe[pattern] = scheme
    return recipe


def parse_patterns(text: str) -> tuple[str, ...]:
    """`*.down_proj, *.layers.0.*` → the patterns."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def matches(pattern: str, name: str, prefix: str) -> bool:
    """Whether a pattern (with * and ?) names a layer: by checkpoint prefix, or by canonical name."""
    return fnmatchcase(prefix, pattern) or fnmatchcase(name, pattern)


def check_patterns(patterns: Iterable[str], outline: Outline) -> None:
    """Raises UsageError `recipe` for a pattern that names no linear layer of the checkpoint."""
    layers = list(_layers(outline))
    unused = [p for p in patterns if not any(matches(p, name, prefix) for name, prefix in layers)]
    refuse_unused(unused, [prefix for _, prefix in layers])


def refuse_unused(unused: Collection[str], prefixes: Collection[str]) -> None:
    """Raises UsageError `recipe` where a pattern matched none of the layers that `prefixes` name."""
    if not unused:
        return
    wrong = next(iter(unused))
    kinds = sorted({prefix.rpartition(".")[2] for prefix in prefixes})
    near = get_close_matches(wrong.strip("*.").rpartition(".")[2], kinds, n=1)
    raise UsageError(
        "recipe",
        f"pattern {wrong!r} matches no linear layer",
        why=f"layers are called like {next(iter(prefixes), 'none')}, and end in {', '.join(kinds)}",
        hint=f"did you mean '*.{near[0]}'?" if near else "use * for any part of a name: '*.down_proj'",
    )


def _layers(outline: Outline) -> Iterator[tuple[str, str]]:
    """(canonical name, prefix in the checkpoint) of every linear layer in the decoder."""
    config = family_for(outline.config).config(outline.config)
    family = family_named(config.family)
    root = find_root(outline, family)
    for layer in range(config.num_layers):
        for name, part in family.linears(config, layer).items():
            yield name, f"{root}.{part.prefix}"
