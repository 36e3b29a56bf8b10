"""Source: what `convert` reads, whatever its form: a config, files that travel, a stream of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from delivery.checkpoint.header import Region
from delivery.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import torch

SOURCE_FORMATS = ("auto", "safetensors", "bin", "gguf")


class Source(Protocol):
    """One model as its publisher stores it."""

    format: str
    path: Path
    """The directory, or the file."""
    config: Mapping[str, Any]
    """The config as the source has it, or as rebuilt from its metadata."""

    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in the order in which they are stored."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor; asking in the order of `names` is fastest."""
        ...

    def region(self, name: str) -> Region | None:
        """Where the tensor lies in a file exactly as `tensor` gives it; None where it is made."""
        ...

    def files(self) -> Mapping[str, Path | bytes]:
        """The other files (tokenizer, templates, licence), by relative name."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, about."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Most memory that one tensor takes while it is read, made into what is written, and written."""
        ...


@runtime_checkable
class Headed(Protocol):
    """A source that knows the shapes of its tensors without reading them."""

    def shape(self, name: str) -> tuple[int, ...]: ...


def detect_format(path: Path) -> str:
    """`safetensors`, `bin` or `gguf`, by what a directory (or file) holds."""
    if path.suffix == ".gguf" or _starts_with_gguf(path):
        return "gguf"
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
        return "safetensors"
    if any(path.glob("*.bin")) or (path / "pytorch_model.bin.index.json").is_file():
        return "bin"
    return "gguf" if any(path.glob("*.gguf")) else "safetensors"


def choose_format(path: Path, stated: str) -> str:
    """The format to read `path` as. Raises UsageError where the stated one disagrees with what is there."""
    if stated not in SOURCE_FORMATS:
        raise UsageError(
            "unknown-source-format",
            f"unknown source format {stated!r}",
            hint=did_you_mean(stated, SOURCE_FORMATS),
        )
    found = detect_format(path)
    if stated in ("auto", found):
        return found
    if path.is_dir() and _holds(path, stated):
        return stated
    raise UsageError(
        "source-format-disagrees",
        f"{path} is not what --source-format says",
        why=f"stated is {stated}, found is {found}",
        hint=f"--source-format {found}, or leave it out",
    )


def _holds(path: Path, source_format: str) -> bool:
    pattern = {"safetensors": "*.safetensors", "bin": "*.bin", "gguf": "*.gguf"}[source_format]
    return any(path.glob(pattern))


def _starts_with_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(4) == b"GGUF"
