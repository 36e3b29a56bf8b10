"""Any source becomes one canonical checkpoint: safetensors shards, Hugging Face names, checked values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from delivery.checkpoint.canonical import Canonical
from delivery.checkpoint.directory import read_config
from delivery.checkpoint.gguf_parts import parts_of
from delivery.checkpoint.layouts import layout_for, source_architectures
from delivery.checkpoint.source import Source, choose_format
from delivery.checkpoint.writer import CheckpointWriter
from delivery.errors import DataError, UsageError
from delivery.model.families import architectures, family_for


def open_source(
    path: Path,
    *,
    architecture: str | None = None,
    source_format: str = "auto",
    dtype: str = "auto",
    dequantize: bool = False,
    trust_remote_code: bool = False,
) -> Canonical:
    """The model at a local path, its architecture known and supported; no weight is read.

    Raises DataError for what is damaged, `unknown-architecture`, UsageError `architecture-disagrees` and
    `source-format-disagrees`.
    """
    if not path.exists():
        raise DataError(
            "checkpoint-missing",
            f"{path} does not exist",
            why="--model takes a path, demo, a Hub id or a URL",
            hint="deliver convert --model demo",
        )
    found = choose_format(path, source_format)
    if found == "gguf":
        from delivery.checkpoint.gguf_source import GgufSource

        gguf = GgufSource(_gguf_file(path), dtype)
        _agree(gguf.config, architecture)
        return Canonical(gguf)
    config = read_config(path)
    if not config.get("architectures") and architecture:
        config = {**config, "architectures": [architecture]}
    _agree(config, architecture)
    check_known(config)
    source: Source
    if found == "bin":
        from delivery.checkpoint.bin_source import BinSource

        source = BinSource(path, config)
    else:
        from delivery.checkpoint.directory_source import DirectorySource

        directory = DirectorySource(path, config)
        source = directory
        if dequantize and directory.checkpoint.quantization is not None:
            from delivery.checkpoint.dequantized import DequantizedSource

            source = DequantizedSource(directory)
    return Canonical(source, dtype, trust_remote_code=trust_remote_code)


def check_known(config: Mapping[str, Any]) -> None:
    """Raises DataError `no-architecture`, or `unknown-architecture` naming all that can be converted."""
    if layout_for(config) is not None:
        return
    try:
        family_for(config)
    except DataError as error:
        if error.code != "unknown-architecture":
            raise
        known = sorted({*architectures(), *source_architectures()})
        raise DataError(
            error.code, error.what, why=f"supported: {', '.join(known)}", hint=error.hint
        ) from None


def convert(source: Canonical, out: Path, shard_bytes: int, advance: Callable[[int], None]) -> dict[str, int]:
    """Write `source` into `out`; returns {"tensors": n, "bytes": n}. `advance` gets the bytes written so far.

    Raises whatever reading raises; nothing is left behind then.
    """
    with CheckpointWriter(out, shard_bytes) as writer:
        count = total = 0
        for name, tensor, region in source.tensors():
            writer.add(name, tensor, region)
            advance(tensor.nbytes)
            count, total = count + 1, total + tensor.nbytes
        for name, content in source.files().items():
            writer.add_file(name, content)
        writer.finish(source.config)
    return {"tensors": count, "bytes": total}


def _gguf_file(path: Path) -> Path:
    if path.is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if not found or found != parts_of(found[0]):
        raise UsageError(
            "gguf-ambiguous",
            f"{path} holds {len(found)} GGUF files",
            why=", ".join(p.name for p in found[:5]),
            hint="give the path of one of them",
        )
    return found[0]


def _agree(config: Mapping[str, Any], architecture: str | None) -> None:
    stated = config.get("architectures") or []
    if architecture and architecture not in stated:
        raise UsageError(
            "architecture-disagrees",
            "the checkpoint is not what --architecture says",
            why=f"--architecture is {architecture}, its config says {', '.join(map(str, stated))}",
            hint="leave --architecture out",
        )
