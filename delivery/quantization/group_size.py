"""A group size for every layer: the requested one where it divides, a smaller one or none elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from delivery.errors import UsageError

LayerKind = Literal["attention", "mlp"]

_SIZES = (256, 128, 64, 32, 16)
SMALLEST = 16


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """Group size by layer kind; −1 is one group per row. embedding: None leaves it in floating point."""

    attention: int = 128
    mlp: int = 128
    embedding: int | None = None

    def of(self, kind: LayerKind) -> int:
        return self.attention if kind == "attention" else self.mlp

    @property
    def uniform(self) -> bool:
        """Whether attention and MLP share one size, so that a format with one size can hold them."""
        return self.attention == self.mlp


def parse_group_size(text: str | int) -> GroupSizes:
    """`128`, `-1`, or by kind `attention=64,mlp=128,embedding=32`.

    Raises UsageError `group-size-option`.
    """
    try:
        if "=" not in str(text):
            size = _checked(int(text))
            return GroupSizes(size, size)
        pairs = dict(part.strip().split("=", 1) for part in str(text).split(","))
        sizes = {kind: _checked(int(size)) for kind, size in pairs.items()}
        return GroupSizes(**sizes)
    except (ValueError, TypeError) as error:
        raise UsageError(
            "group-size-option",
            f"group size {text!r} is not understood",
            why="expected a number from 16 up, -1, or attention=…,mlp=…,embedding=…",
            hint="--group-size 128",
        ) from error


def fit_group_size(wanted: int, columns: int, shards: int = 1) -> int | None:
    """The largest of the usual sizes up to `wanted` that divides `columns` / `shards`; None for none.

    columns: input features. shards: tensor-parallel ranks that the input features are cut over.
    """
    if wanted == -1:
        return -1
    if columns % shards:
        return None
    per_shard = columns // shards
    sizes = (wanted, *(s for s in _SIZES if s < wanted))
    return next((s for s in sizes if per_shard % s == 0), None)


def common_group_size(wanted: int, columns: Iterable[int], minimum: int = 32) -> int:
    """One size for a format that knows only one: the largest up to `wanted` that fits most features.

    A smaller size is taken where it lets more of the weights be quantised. Sizes under `minimum`
    are not tried; `wanted` itself comes back when nothing fits better.
    """
    widths = list(columns)
    sizes = [wanted, *(s for s in _SIZES if minimum <= s < wanted)]
    return max(sizes, key=lambda s: (sum(w for w in widths if w % s == 0), s)) if wanted != -1 else -1


def reduced(chosen: Mapping[str, int | None], wanted: Mapping[str, int]) -> dict[str, str]:
    """Layer → a sentence, for every layer whose group size differs from the requested one."""
    notes = {}
    for name, size in chosen.items():
        if size is None:
            notes[name] = f"left unquantised: no group size up to {wanted[name]} divides its input features"
        elif size != wanted[name]:
            notes[name] = (
                f"group size {size} instead of {wanted[name]}, which does not divide its input features"
            )
    return notes


def _checked(size: int) -> int:
    if size != -1 and size < SMALLEST:
        raise ValueError(size)
    return size
