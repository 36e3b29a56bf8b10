"""Piece: one canonical tensor and what it is made from. Layouts are lists of pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def same(values: torch.Tensor) -> torch.Tensor:
    return values


@dataclass(frozen=True, slots=True)
class Piece:
    """`take` makes the canonical tensor `name` from the source's tensor `source`."""

    name: str
    source: str
    take: Callable[[torch.Tensor], torch.Tensor] = same
    keeps_shape: bool = False
    """Whether `take` changes values or their order alone, so that the shape is known without torch."""

    def shape(self, source: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape, for the shape of its source."""
        if self.take is same or self.keeps_shape:
            return source
        import torch

        return tuple(self.take(torch.empty(source, device="meta")).shape)
