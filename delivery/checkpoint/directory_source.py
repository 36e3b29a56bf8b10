"""A Hugging Face directory of safetensors as a source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.checkpoint.header import Region
from delivery.checkpoint.reader import Checkpoint
from delivery.checkpoint.writer import carried_files

if TYPE_CHECKING:
    import torch


class DirectorySource:
    """Safetensors, single or sharded, whose names and values are already canonical; see `Source`."""

    format = "safetensors"

    def __init__(self, path: Path, config: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.checkpoint = Checkpoint.open(path, config)
        self.config: Mapping[str, Any] = self.checkpoint.config

    def names(self) -> tuple[str, ...]:
        return self.checkpoint.names()

    def tensor(self, name: str) -> torch.Tensor:
        return self.checkpoint.tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.shape(name)

    def region(self, name: str) -> Region:
        return self.checkpoint.region(name)

    def files(self) -> Mapping[str, Path | bytes]:
        return dict(carried_files(self.checkpoint.path))

    @property
    def size_bytes(self) -> int:
        return self.checkpoint.size_bytes()

    @property
    def peak_bytes(self) -> int:
        # Mapped, cast or rearranged, and the copy that the writer may hold.
        return 3 * max((self.checkpoint.info(n).size_bytes for n in self.checkpoint.names()), default=0)
