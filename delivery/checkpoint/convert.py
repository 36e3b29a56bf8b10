"""Any source becomes one canonical checkpoint: safetensors shards, Hugging Face names, checked values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.checkpoint.directory import read_config
from delivery.checkpoint.source import Source, choose_format
from delivery.checkpoint.writer import CheckpointWriter
from delivery.errors import DataError, UsageError
from delivery.model.families import family_for

if TYPE_CHECKING:
    import torch


def open_source(
    path: Path,
    *,
    architecture: str | None = None,
    source_format: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Source:
    """The model at a local path, its architecture known and supported; no weight is read.

    Raises DataError for what is damaged, `unknown-architecture`, UsageError `architecture-disagrees` and
    `source-format-disagrees`.
    """
    if not path.exists():
        raise DataError(
            "checkpoint-missing",
            f"{path} is not there",
            why="--model takes a path, demo, a Hub id or a URL",
            hint="deliver convert --model demo",
        )
    found = choose_format(path, source_format)
    if found == "gguf":
        from delivery.checkpoint.gguf_source import GgufSource

        source: Source = GgufSource(_gguf_file(path), dtype)
        _agree(source.config, architecture)
        return source
    config = read_config(path)
    if not config.get("architectures") and architecture:
        config = {**config, "architectures": [architecture]}
    _agree(config, architecture)
    family_for(config)
    from delivery.checkpoint.directory_source import DirectorySource

    return DirectorySource(path, config)


def convert(source: Source, out: Path, shard_bytes: int, advance: Callable[[int], None]) -> dict[str, Any]:
    """Write `source` into `out`; gives {"tensors": n, "bytes": n}. `advance` is told bytes as they go.

    Raises DataError `tensor-not-finite` and whatever reading raises; nothing is left behind then.
    """
    with CheckpointWriter(out, shard_bytes) as writer:
        for name, content in source.files().items():
            writer.add_file(name, content)
        count = total = 0
        for name, tensor in source.tensors():
            check_finite(name, tensor)
            writer.add(name, tensor)
            advance(tensor.nbytes)
            count, total = count + 1, total + tensor.nbytes
        writer.finish(dict(source.config))
    return {"tensors": count, "bytes": total}


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raises DataError `tensor-not-finite`, naming the tensor and how many values are NaN or infinite."""
    import torch

    if not tensor.dtype.is_floating_point or tensor.numel() == 0:
        return
    values = tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor
    low, high = torch.aminmax(values)
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return
    bad = int((~torch.isfinite(values)).sum())
    raise DataError(
        "tensor-not-finite",
        f"tensor {name!r} holds NaN or infinite values",
        why=f"{bad} of {tensor.numel()} values",
        hint="the training run or the copy is damaged; get a good one",
    )


def _gguf_file(path: Path) -> Path:
    if path.is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) != 1:
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
