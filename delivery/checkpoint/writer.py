"""CheckpointWriter: a stream of tensors becomes shards, an index and a config.

At most one tensor is held: its bytes go to the shard's file at once, and the header is written into
space kept free in front (padded with blanks, as the format allows). Everything happens in a folder
of its own inside the target until `finish` moves it into place: shards first, then the index, then
the config, so that a directory with a config is whole.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from delivery.artifact import walk
from delivery.checkpoint.directory import CONFIG, INDEX, SINGLE, check_relative, read_tensors
from delivery.checkpoint.header import Region
from delivery.checkpoint.reader import safetensors_dtype
from delivery.errors import DataError, EnvironmentLacking

if TYPE_CHECKING:
    import torch

    from delivery.checkpoint.reader import Checkpoint

_RESERVED_BYTES = 1 << 20
_SMALL_BYTES = 8 << 20
_CHUNK_BYTES = 64 << 20
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".ot", ".ckpt", ".npz"),
    *(".onnx", ".onnx_data", ".tflite"),
)
_NOT_COPIED = frozenset({CONFIG, "manifest.json", "run.json"})


class CheckpointWriter:
    """Writes a Hugging Face model directory.

    out: the directory; made where it does not exist. shard_bytes: largest size of one file's data.
    Use it in a `with` block: an error inside removes everything that was written.
    """

    def __init__(self, out: Path | str, shard_bytes: int = 5_000_000_000) -> None:
        self.out = Path(out)
        self._made = not self.out.exists()
        self._work = self.out / ".partial"
        self._shard_bytes = shard_bytes
        self._names: set[str] = set()
        self._shards: list[_Shard] = []
        with _disk(self.out):
            shutil.rmtree(self._work, ignore_errors=True)
            self._work.mkdir(parents=True)

    def add(self, name: str, tensor: torch.Tensor, region: Region | None = None) -> None:
        """Append one tensor. region: where the same bytes lie in a file, from which the kernel copies them.

        Raises DataError `tensor-twice`, EnvironmentLacking `disk-full`.
        """
        if name in self._names:
            raise DataError("tensor-twice", f"tensor {name!r} was written before", why=f"into {self.out}")
        self._names.add(name)
        data = tensor.detach().cpu().contiguous()
        dtype = safetensors_dtype(data.dtype)
        with _disk(self.out):
            shard = self._shard_for(name, data.nbytes)
            shard.add(name, dtype, tuple(data.shape), _bytes_of(data), region)

    def copy_files(self, source: Checkpoint) -> tuple[str, ...]:
        """Copy every file of the source that holds no weights, byte for byte; returns their names.

        Left out are the config and the indexes (written by `finish`) and manifests of artifacts.
        Links are followed, so the result holds regular files.
        """
        files = carried_files(source.path)
        for name, path in files.items():
            self.add_file(name, path)
        return tuple(files)

    def add_file(self, name: str, content: bytes | Path) -> None:
        """Add a file: its bytes, or the path of a file to copy."""
        check_relative(name, "the source")
        with _disk(self.out):
            target = self._work / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                target.write_bytes(content)
            else:
                shutil.copyfile(content, target)

    def finish(self, config: dict[str, Any]) -> None:
        """Close the last shard, read headers and index back, and move everything into place, the config last.

        Raises DataError `weights-missing`, `written-wrong`, EnvironmentLacking `disk-full`.
        """
        with _disk(self.out):
            for shard in self._shards:
                shard.close()
            names = self._move_shards()
            if len(names) > 1:
                self._write_index(names)
            self._read_back()
            text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
            (self._work / CONFIG).write_text(text, "utf-8")
            rest = sorted(p for p in self._work.rglob("*") if p.is_file())
            for path in sorted(rest, key=lambda p: (p.name == CONFIG, p.name == INDEX)):
                target = self.out / path.relative_to(self._work)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
            shutil.rmtree(self._work)

    def abandon(self) -> None:
        """Remove what was written."""
        for shard in self._shards:
            shard.discard()
        shutil.rmtree(self._work, ignore_errors=True)
        if self._made:
            shutil.rmtree(self.out, ignore_errors=True)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abandon()

    def _shard_for(self, name: str, size_bytes: int) -> _Shard:
        if self._shards and self._shards[-1].fits(name, size_bytes, self._shard_bytes):
            return self._shards[-1]
        if self._shards:
            self._shards[-1].close()
        self._shards.append(_Shard(self._work / f"shard-{len(self._shards):05d}"))
        return self._shards[-1]

    def _move_shards(self) -> list[str]:
        if not self._shards:
            raise DataError("weights-missing", f"nothing was written into {self.out}")
        count = len(self._shards)
        names = [SINGLE] if count == 1 else [_shard_name(i, count) for i in range(count)]
        for shard, name in zip(self._shards, names, strict=True):
            os.replace(shard.path, self._work / name)
        return names

    def _read_back(self) -> None:
        found = {n: (i.dtype, list(i.shape)) for n, i in read_tensors(self._work).items()}
        wanted = {n: (e["dtype"], e["shape"]) for s in self._shards for n, e in s.entries.items()}
        if found != wanted:
            name = min(n for n in {**found, **wanted} if found.get(n) != wanted.get(n))
            raise DataError(
                "written-wrong",
                f"tensor {name!r} was written wrongly",
                why=f"expected {wanted.get(name)}, read back {found.get(name)}",
                hint="check the disk; the same command writes again",
            )

    def _write_index(self, names: list[str]) -> None:
        weight_map = {n: f for s, f in zip(self._shards, names, strict=True) for n in s.entries}
        total = sum(s.size_bytes for s in self._shards)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (self._work / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def carried_files(directory: Path) -> dict[str, Path]:
    """Files of a checkpoint that travel unchanged into what is made from it: all but weights and config."""
    return {
        name: path
        for name, path in walk(directory)
        if path.name not in _NOT_COPIED and not name.endswith((*_WEIGHTS, ".index.json"))
    }


@dataclass
class _Shard:
    """One file being written; small ones stay in memory and get a header without padding."""

    path: Path
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    size_bytes: int = 0
    header_bytes: int = 2
    _held: list[bytes] = field(default_factory=list)
    _stream: BinaryIO | None = None
    _closed: bool = False

    def fits(self, name: str, size_bytes: int, limit_bytes: int) -> bool:
        if self._closed or (self.size_bytes and self.size_bytes + size_bytes > limit_bytes):
            return False
        return self.header_bytes + _entry_bytes(name) <= _RESERVED_BYTES

    def add(
        self, name: str, dtype: str, shape: tuple[int, ...], data: memoryview, region: Region | None
    ) -> None:
        end = self.size_bytes + data.nbytes
        self.entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [self.size_bytes, end]}
        self.header_bytes += _entry_bytes(name)
        self.size_bytes = end
        if self._stream is None and end > _SMALL_BYTES:
            self._stream = self.path.open("wb")
            self._stream.write(b"\0" * (8 + _RESERVED_BYTES))
            self._stream.writelines(self._held)
            self._held.clear()
        if self._stream is None:
            self._held.append(bytes(data))
        elif region is None or not _copied(region, self._stream):
            for start in range(0, data.nbytes, _CHUNK_BYTES):
                self._stream.write(data[start : start + _CHUNK_BYTES])

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        header = {"__metadata__": {"format": "pt"}, **self.entries}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
        if self._stream is None:
            text += b" " * (-len(text) % 8)
            with self.path.open("wb") as stream:
                stream.write(len(text).to_bytes(8, "little") + text)
                stream.writelines(self._held)
            self._held.clear()
            return
        self._stream.seek(0)
        self._stream.write(_RESERVED_BYTES.to_bytes(8, "little") + text.ljust(_RESERVED_BYTES))
        self._stream.close()

    def discard(self) -> None:
        self._held.clear()
        if self._stream is not None:
            self._stream.close()


def _copied(region: Region, stream: BinaryIO) -> bool:
    """Append a region of a file without taking it through memory; False where that cannot be done."""
    if not hasattr(os, "copy_file_range"):
        return False
    stream.flush()
    begin = stream.tell()
    done = 0
    with region.path.open("rb") as source:
        while done < region.size_bytes:
            try:
                count = os.copy_file_range(
                    source.fileno(),
                    stream.fileno(),
                    region.size_bytes - done,
                    region.offset + done,
                    begin + done,
                )
            except OSError as error:
                if done or error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                return False
            if count == 0:
                raise OSError(errno.EIO, f"{region.path.name} ended early while it was copied")
            done += count
    stream.seek(begin + done)
    return True


def _entry_bytes(name: str) -> int:
    """An upper bound of what one tensor adds to the header's text."""
    return len(json.dumps(name)) + 200 + 22 * 8


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def _disk(out: Path) -> Iterator[None]:
    """Turn a full disk into one clear error."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise EnvironmentLacking(
            "disk-full",
            f"no space left while writing {out}",
            why=str(error),
            hint="free space, or use another --workdir or --out",
        ) from error
