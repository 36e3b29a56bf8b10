"""Safetensors headers, read and checked before a byte of data is trusted. No torch.

The file is 8 bytes of little-endian length, a JSON header of that length, then the data. Everything
in the header is an outsider's claim: sizes are capped before reading, and every claim is held
against the others and against the size of the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delivery.errors import DataError

MAX_HEADER_BYTES = 32 << 20
"""About 200,000 tensors. Parsed, a hostile header of this size stays under 1 GB of memory."""

MAX_DIMENSIONS = 64
_LENGTH_BYTES = 8
_GET_AGAIN = "get the file again from its source"

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `dtype` is safetensors' name (`BF16`), `offset` counts from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    shard: str
    size_bytes: int
    offset: int = 0

    @property
    def count(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of a file: where a tensor lies, for copying it without reading it."""

    path: Path
    offset: int
    size_bytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of one safetensors file, in the order of its data.

    Raises DataError `shard-missing`, `shard-truncated` (names the file and both sizes),
    `header-too-large` or `header-damaged`.
    """
    try:
        with path.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            text = _header_text(path, stream.read(_LENGTH_BYTES), file_bytes, stream)
    except FileNotFoundError as error:
        raise DataError("shard-missing", f"{path.name} does not exist", why=f"expected {path}") from error
    data_start = _LENGTH_BYTES + len(text)
    entries = _parse(path, text)
    infos = {name: _entry(path, name, entry, data_start) for name, entry in entries.items()}
    return _check_extent(path, infos, data_start, file_bytes)


def _header_text(path: Path, length_bytes: bytes, file_bytes: int, stream: Any) -> bytes:
    if len(length_bytes) < _LENGTH_BYTES:
        raise DataError(
            "shard-truncated",
            f"{path.name} is truncated",
            why=f"a safetensors file has at least {_LENGTH_BYTES} bytes, this one {file_bytes}",
            hint=_GET_AGAIN,
        )
    length = int.from_bytes(length_bytes, "little")
    if length > MAX_HEADER_BYTES:
        raise DataError(
            "header-too-large",
            f"{path.name} is not a safetensors file, or its header is damaged",
            why=f"the header claims {length} bytes, the limit is {MAX_HEADER_BYTES}",
            hint=_GET_AGAIN,
        )
    if length > file_bytes - _LENGTH_BYTES:
        raise DataError(
            "shard-truncated",
            f"{path.name} is truncated",
            why=f"the header alone needs {length + _LENGTH_BYTES} bytes, the file has {file_bytes}",
            hint=_GET_AGAIN,
        )
    text: bytes = stream.read(length)
    return text


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("a name occurs twice")
        return out

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, f"expected an object, got {type(header).__name__}")
    header.pop("__metadata__", None)
    return header


def _entry(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _damaged(path, f"tensor {name!r} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _damaged(path, f"tensor {name!r} has the unknown dtype {dtype!r:.40}")
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise _damaged(path, f"the shape of tensor {name!r} is not a list of counts")
    if not _counts(offsets) or len(offsets) != 2:
        raise _damaged(path, f"data_offsets of tensor {name!r} are not two counts")
    begin, end = offsets
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    if bits % 8 or end - begin != bits // 8:
        raise _damaged(
            path,
            f"tensor {name!r} of dtype {dtype} and shape {shape!r:.120} needs {bits / 8:.0f} bytes,"
            f" its offsets give {end - begin}",
        )
    return TensorInfo(dtype, tuple(shape), path.name, end - begin, data_start + begin)


def _check_extent(
    path: Path, infos: dict[str, TensorInfo], data_start: int, file_bytes: int
) -> dict[str, TensorInfo]:
    ordered = sorted(infos.items(), key=lambda item: (item[1].offset, item[1].size_bytes))
    position = data_start
    for name, info in ordered:
        if info.offset != position:
            word = "overlaps the one before" if info.offset < position else "leaves a gap before it"
            raise _damaged(path, f"the data of tensor {name!r} {word}")
        position += info.size_bytes
    if position > file_bytes:
        raise DataError(
            "shard-truncated",
            f"{path.name} is truncated",
            why=f"its header needs {position} bytes, the file has {file_bytes}",
            hint=_GET_AGAIN,
        )
    if position < file_bytes:
        raise _damaged(path, f"{file_bytes - position} bytes follow the last tensor")
    return dict(ordered)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def _damaged(path: Path, why: str) -> DataError:
    return DataError("header-damaged", f"the header of {path.name} is damaged", why=why, hint=_GET_AGAIN)
