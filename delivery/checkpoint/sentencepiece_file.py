"""SentencePiece's `tokenizer.model`: a protocol buffer, of which a handful of fields matter here.

Its pieces are described as GGUF describes them, so one builder makes a `tokenizer.json` of both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from delivery.errors import DataError

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_BPE = 2
_IDS = {40: "unknown", 41: "bos", 42: "eos", 43: "padding"}
_DEFAULT_IDS = {"unknown": 0, "bos": 1, "eos": 2}


def read_sentencepiece(path: Path) -> dict[str, Any]:
    """Metadata as of a GGUF file (`tokenizer.ggml.*`) of a BPE model.

    Raises DataError `tokenizer-damaged`, `tokenizer-unsupported` for models that are no BPE.
    """
    tokens: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    ids: dict[str, int] = dict(_DEFAULT_IDS)
    prefix_space, model_type = True, 1
    try:
        for field, value in _fields(path.read_bytes()):
            if field == _PIECES and isinstance(value, bytes):
                piece = dict(_fields(value))
                tokens.append(bytes(piece.get(1, b"")).decode("utf-8"))
                scores.append(struct.unpack("<f", bytes(piece.get(2, b"\0\0\0\0")))[0])
                kinds.append(int(piece.get(3, 1)))
            elif field == _TRAINER and isinstance(value, bytes):
                trainer = dict(_fields(value))
                model_type = int(trainer.get(3, 1))
                ids |= {name: _signed(trainer[f]) for f, name in _IDS.items() if f in trainer}
            elif field == _NORMALIZER and isinstance(value, bytes):
                prefix_space = bool(dict(_fields(value)).get(3, 1))
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, ValueError) as error:
        raise DataError("tokenizer-damaged", f"{path} cannot be read", why=str(error)) from error
    if not tokens:
        raise DataError("tokenizer-damaged", f"{path} cannot be read", why="it holds no pieces")
    if model_type != _BPE:
        raise DataError(
            "tokenizer-unsupported",
            f"{path} is not a BPE model",
            why=f"its model type is {model_type}, BPE is {_BPE}",
            hint="save the tokenizer once with transformers so that tokenizer.json exists",
        )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": prefix_space,
        **{f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items() if value >= 0},
    }


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of every field of a message; varints as int, the rest as bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire == 2:
            length, position = _varint(data, position)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if position + length > len(data):
            raise ValueError(f"a field ends beyond the file, at byte {position + length}")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
        if shift > 63:
            raise ValueError(f"a number without end at byte {position}")


def _signed(value: int | bytes) -> int:
    """int32 fields are written as 64-bit two's complement."""
    number = int(value)
    return number - (1 << 64) if number >= 1 << 63 else number
