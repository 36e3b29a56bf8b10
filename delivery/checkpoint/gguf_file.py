"""GGUF files: metadata and where each tensor lies, read with caps; values by the `gguf` package.

The header is parsed here rather than by `gguf.GGUFReader`, which makes a numpy object of every token
of the vocabulary (seconds) and trusts the counts that the file claims.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from delivery.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEYS = 100_000
_MAX_TENSORS = 1_000_000
_MAX_DIMENSIONS = 8
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` slowest dimension first, as torch has it; `kind` is GGML's type name (`Q4_1`)."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class GgufFile:
    """An open GGUF file.

    Raises DataError `gguf-damaged` (truncated, contradictory), `gguf-type-unsupported` when reading a
    tensor whose type cannot be dequantised.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as stream:
            try:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise self._damaged("the file is empty") from error
        self._position = 0
        try:
            self.metadata, self.tensors = self._parse()
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise self._damaged(f"the header ends early or is not text: {error}") from error

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._map.close()

    def read(self, name: str) -> NDArray[Any]:
        """A tensor's values: float32 where quantised, otherwise the stored type (BF16 as uint16 bits)."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, tensor.size_bytes, tensor.offset)
        plain = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
        if tensor.kind in plain:
            return raw.view(plain[tensor.kind]).reshape(tensor.shape).copy()
        rows = raw.reshape(*tensor.shape[:-1], -1)
        try:
            out = dequantize(rows, GGMLQuantizationType[tensor.kind])
        except NotImplementedError as error:
            raise DataError(
                "gguf-type-unsupported",
                f"tensor {name!r} of {self.path.name} cannot be dequantised",
                why=f"its type is {tensor.kind}",
                hint="quantise it again to a type such as Q4_K, Q8_0 or F16",
            ) from error
        return np.asarray(out, np.float32).reshape(tensor.shape)

    def _parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._map[:4] != _MAGIC:
            raise self._damaged(f"it starts with {bytes(self._map[:4])!r}, not {_MAGIC!r}")
        self._position = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise self._damaged(f"it has version {version}, supported are {_VERSIONS} (little endian)")
        tensor_count, key_count = self._scalar("Q"), self._scalar("Q")
        if tensor_count > _MAX_TENSORS or key_count > _MAX_KEYS:
            raise self._damaged(f"it claims {tensor_count} tensors and {key_count} keys")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        return metadata, self._tensor_infos(tensor_count, metadata)

    def _tensor_infos(self, count: int, metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        found: list[tuple[str, str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = self._string()
            dimensions = self._scalar("I")
            if dimensions > _MAX_DIMENSIONS:
                raise self._damaged(f"tensor {name!r} has {dimensions} dimensions")
            shape = tuple(reversed([self._scalar("Q") for _ in range(dimensions)]))
            number, offset = self._scalar("I"), self._scalar("Q")
            try:
                kind = GGMLQuantizationType(number)
            except ValueError as error:
                raise self._damaged(f"tensor {name!r} has the unknown type {number}") from error
            block, block_bytes = GGML_QUANT_SIZES[kind]
            elements = 1
            for size in shape:
                elements *= size
            if not shape or shape[-1] % block:
                raise self._damaged(f"rows of tensor {name!r}, {shape}, are not a multiple of {block}")
            found.append((name, kind.name, shape, offset, elements // block * block_bytes))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._damaged(f"its alignment is {alignment!r}")
        start = -(-self._position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind_name, shape, offset, size_bytes in found:
            if name in tensors:
                raise self._damaged(f"tensor {name!r} occurs twice")
            if start + offset + size_bytes > len(self._map):
                raise DataError(
                    "shard-truncated",
                    f"{self.path.name} is truncated",
                    why=f"tensor {name!r} ends at byte {start + offset + size_bytes},"
                    f" the file has {len(self._map)}",
                    hint="get the file again from its source",
                )
            tensors[name] = GgufTensor(name, kind_name, shape, start + offset, size_bytes)
        return tensors

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._code(kind))
        inner, count = self._scalar("I"), self._scalar("Q")
        if count > len(self._map):
            raise self._damaged(f"an array claims {count} entries")
        if inner == _STRING:
            return [self._string() for _ in range(count)]
        if inner == _ARRAY:
            raise self._damaged("it holds arrays of arrays")
        layout = f"<{count}{self._code(inner)}"
        values = struct.unpack_from(layout, self._map, self._position)
        self._position += struct.calcsize(layout)
        return list(values)

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._damaged(f"a value has the unknown type {kind}")
        return _SCALARS[kind]

    def _scalar(self, code: str) -> Any:
        layout = f"<{code}"
        (value,) = struct.unpack_from(layout, self._map, self._position)
        self._position += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        end = self._position + length
        if end > len(self._map):
            raise self._damaged(f"a text claims {length} bytes")
        text = self._map[self._position : end].decode("utf-8")
        self._position = end
        return text

    def _damaged(self, why: str) -> DataError:
        return DataError(
            "gguf-damaged",
            f"{self.path.name} cannot be read as GGUF",
            why=why,
            hint="get the file again from its source",
        )
