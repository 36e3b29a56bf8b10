"""A GGUF file as a source: canonical names, config and tokenizer rebuilt from its metadata.

Stored dtype: what the file's matrices have where they are F16, BF16 or F32. Where they are quantised,
bfloat16: a block's values carry 2 to 8 bits, so the rounding of bfloat16 (relative 2^−9) lies far
below the error that quantising left (tests measure it), it costs half of float32, and unlike float16
it cannot overflow in the engines that compute in the stored dtype. `dtype="float32"` keeps every bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from delivery.checkpoint.directory import GENERATION_CONFIG
from delivery.checkpoint.gguf_config import rebuild_config, rebuild_generation_config
from delivery.checkpoint.gguf_layout import layout_of, pieces
from delivery.checkpoint.gguf_parts import GgufParts
from delivery.checkpoint.gguf_tokenizer import as_json, rebuild_tokenizer
from delivery.checkpoint.tokenizer import TOKENIZER_CONFIG, TOKENIZER_JSON
from delivery.errors import DataError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_STORED = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float32"}


class GgufSource:
    """One GGUF file, or one of several that make up a model; see `Source`.

    Raises DataError `unknown-architecture`, `gguf-damaged`, `gguf-tensor-unknown` and others on opening.
    """

    format = "gguf"

    def __init__(self, path: Path, dtype: str = "auto") -> None:
        self._file = GgufParts(path)
        self.path = self._file.path
        layout = layout_of(self._file.metadata)
        self.dtype = self._own_dtype() if dtype == "auto" else dtype
        self.config: Mapping[str, Any] = rebuild_config(self._file, self.dtype)
        self._pieces = {p.name: p for p in pieces(layout, self.config, iter(self._file.tensors))}
        self._last: tuple[str, Any] = ("", None)

    def names(self) -> tuple[str, ...]:
        return tuple(self._pieces)

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        piece = self._pieces[name]
        if self._last[0] != piece.source:
            self._last = (piece.source, as_torch(self._file.read(piece.source)))
        return piece.take(self._last[1]).to(getattr(torch, self.dtype))

    def shape(self, name: str) -> tuple[int, ...]:
        piece = self._pieces[name]
        return piece.shape(self._file.tensors[piece.source].shape)

    def region(self, name: str) -> None:
        return None

    def files(self) -> Mapping[str, Path | bytes]:
        tokenizer, tokenizer_config = rebuild_tokenizer(self._file.metadata)
        return {
            TOKENIZER_JSON: tokenizer.encode(),
            TOKENIZER_CONFIG: as_json(tokenizer_config).encode(),
            GENERATION_CONFIG: as_json(rebuild_generation_config(self._file.metadata)).encode(),
            "README.md": _card(self._file.metadata).encode(),
        }

    @property
    def size_bytes(self) -> int:
        width = 4 if self.dtype == "float32" else 2
        return width * sum(self._count(t.shape) for t in self._file.tensors.values())

    @property
    def peak_bytes(self) -> int:
        # The file's pages, the values in float32, rearranged, and as they are stored.
        width = 1 + 4 + 4 + (4 if self.dtype == "float32" else 2)
        return width * max((self._count(t.shape) for t in self._file.tensors.values()), default=0)

    def _own_dtype(self) -> str:
        kinds = {t.kind for t in self._file.tensors.values() if len(t.shape) > 1}
        if not kinds:
            raise DataError("weights-missing", f"{self._file.path.name} holds no matrices")
        if len(kinds) == 1 and (only := next(iter(kinds))) in _STORED:
            return _STORED[only]
        return "float32" if kinds == {"F32", "F64"} else "bfloat16"

    @staticmethod
    def _count(shape: tuple[int, ...]) -> int:
        count = 1
        for size in shape:
            count *= size
        return count


def _card(metadata: Mapping[str, Any]) -> str:
    """A model card with what the file says of its origin: name, licence, languages."""
    lines = ["---"]
    lines += [f"license: {metadata['general.license']}"] if metadata.get("general.license") else []
    languages = metadata.get("general.languages") or []
    lines += ["language:", *(f"- {code}" for code in languages)] if languages else []
    name = metadata.get("general.name") or metadata.get("general.basename") or "Model"
    by = f", by {metadata['general.organization']}" if metadata.get("general.organization") else ""
    return "\n".join([*lines, "---", "", f"# {name}{by}", "", "Converted from GGUF.", ""])


def as_torch(values: NDArray[Any]) -> torch.Tensor:
    """A tensor of what `GgufFile.read` gave; bits of BF16 become bfloat16."""
    import torch

    if values.dtype == np.uint16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
