"""Outline: what is known of a checkpoint by config and headers, perhaps before it is written. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol


class Outline(Protocol):
    """A checkpoint without its weights; `Checkpoint` is one, `PredictedOutline` another."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def quantization(self) -> Mapping[str, Any] | None: ...

    def names(self) -> Collection[str]: ...

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def size_bytes(self) -> int: ...


class PredictedOutline:
    """The outline of a checkpoint that is still to be written.

    shape: returns the shape of a tensor, on demand. size_bytes: approximate size of all tensors.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        names: Collection[str],
        shape: Callable[[str], tuple[int, ...]],
        size_bytes: int,
    ) -> None:
        self.config = config
        self.shape = shape
        self._names = dict.fromkeys(names)
        self._size_bytes = size_bytes

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        return quantization_of(self.config)

    def names(self) -> Collection[str]:
        return self._names

    def has(self, name: str) -> bool:
        return name in self._names

    def size_bytes(self) -> int:
        return self._size_bytes


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config's `quantization_config` (or that of its language tower); None for plain weights."""
    found = config.get("quantization_config")
    if found is None and isinstance(config.get("text_config"), dict):
        found = config["text_config"].get("quantization_config")
    return found if isinstance(found, dict) else None
