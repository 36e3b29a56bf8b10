"""The files of a Hugging Face model directory: configs, and which shard holds which tensor. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from delivery.checkpoint.header import TensorInfo, read_header
from delivery.errors import DataError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_JSON_BYTES = 256 << 20


def read_json(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """A JSON object from a file. Raises DataError `json-damaged`; a missing file is {}.

    unique: refuse duplicate keys in an object, which readers resolve differently.
    """
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes, the limit is {_MAX_JSON_BYTES}")
        value = json.loads(path.read_text("utf-8"), object_pairs_hook=_unique if unique else None)
        if not isinstance(value, dict):
            raise ValueError(f"expected an object, got {type(value).__name__}")
    except (ValueError, RecursionError) as error:
        raise DataError(
            "json-damaged",
            f"{path.name} cannot be read",
            why=str(error),
            hint=f"get the file again from its source: {path}",
        ) from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return out


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a model directory.

    Raises DataError `checkpoint-missing`, `config-missing` or `json-damaged`.
    """
    if not directory.is_dir():
        raise DataError(
            "checkpoint-missing",
            f"{directory} is not a checkpoint",
            why="a Hugging Face model directory is expected" + (", got a file" if directory.exists() else ""),
            hint="deliver convert --model MODEL --out DIR",
        )
    if not (directory / CONFIG).is_file():
        raise DataError(
            "config-missing",
            f"{directory} is not a checkpoint",
            why=f"it has no {CONFIG}",
            hint="give the directory that holds config.json and the weights",
        )
    return read_json(directory / CONFIG, unique=True)


def read_tensors(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of a directory's safetensors; index and headers are checked against each other.

    Raises DataError `weights-missing`, `index-missing`, `shard-missing`, `index-disagrees`,
    `tensor-twice` and what `read_header` raises.
    """
    if (directory / INDEX).is_file():
        return _indexed(directory, read_json(directory / INDEX, unique=True))
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    found = sorted(p.name for p in directory.glob("*.safetensors"))
    if found:
        raise DataError(
            "index-missing",
            f"{directory} has shards and no {INDEX}",
            why=f"found {', '.join(found[:3])}{', ...' if len(found) > 3 else ''}",
            hint="get the index from where the checkpoint came from",
        )
    others = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".gguf"))
    if others:
        raise DataError(
            "weights-missing",
            f"{directory} has no safetensors",
            why=f"found {', '.join(others[:3])}{', ...' if len(others) > 3 else ''}",
            hint=f"deliver convert --model {directory} --out DIR",
        )
    raise DataError(
        "weights-missing",
        f"{directory} has no weights",
        why="it has no .safetensors, .bin or .gguf file",
        hint="give the directory that holds config.json and the weights",
    )


def _indexed(directory: Path, index: Mapping[str, Any]) -> dict[str, TensorInfo]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise DataError("index-disagrees", f"{INDEX} has no usable weight_map")
    infos: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        check_relative(shard, INDEX)
        if not (directory / shard).is_file():
            count = sum(v == shard for v in weight_map.values())
            raise DataError(
                "shard-missing",
                f"{shard} does not exist",
                why=f"{INDEX} says that it holds {count} tensors",
                hint="get the file from where the checkpoint came from",
            )
        for name, info in read_header(directory / shard).items():
            if name in infos:
                raise DataError(
                    "tensor-twice",
                    f"tensor {name!r} occurs in two shards",
                    why=f"{infos[name].shard} and {shard} both contain it",
                )
            if weight_map.get(name) != shard:
                said = f"in {weight_map[name]}" if name in weight_map else "nowhere"
                raise DataError(
                    "index-disagrees",
                    f"{INDEX} and {shard} disagree",
                    why=f"tensor {name!r} is in {shard}, the index has it {said}",
                )
            infos[name] = replace(info, shard=shard)  # it may lie in a folder of its own
    for name, shard in weight_map.items():
        if name not in infos:
            raise DataError(
                "index-disagrees",
                f"{INDEX} and {shard} disagree",
                why=f"the index has tensor {name!r} in {shard}, whose header does not name it",
            )
    return infos


def check_relative(name: str, source: str) -> None:
    """Raises DataError `path-escapes` for a file name that leaves its directory."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise DataError(
            "path-escapes",
            f"{source} names a file outside its own directory",
            why=f"got {name!r:.120}",
            hint="do not use this file; get it from a source that you trust",
        )
