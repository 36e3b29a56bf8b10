"""`pytorch_model.bin`, single or sharded, as a source: loaded weights-only, one file at a time.

A pickle may run code when it is loaded. torch's weights-only unpickler builds tensors and plain
containers only; a file that wants anything else is refused by the name of what it wants.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.checkpoint.directory import check_relative, read_json
from delivery.checkpoint.writer import carried_files
from delivery.errors import DataError

if TYPE_CHECKING:
    import torch

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
_WRONG = (RuntimeError, EOFError, ValueError, OSError, LookupError, AttributeError, TypeError)
_BROKEN = (*_WRONG, AssertionError, struct.error, MemoryError, OverflowError)
"""What torch.load raises for a damaged file."""
_WANTED = re.compile(r"(?:GLOBAL|Unsupported class|unrecognized function|new object for) ([\w.]+)")


class BinSource:
    """See `Source`. Raises DataError `weights-missing`, `shard-missing`, `index-disagrees`,
    `pickle-runs-code`, `pickle-damaged`.
    """

    format = "bin"

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config = config
        self._shards = self._find_shards()
        self._open: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def names(self) -> tuple[str, ...]:
        return tuple(self._homes)

    def tensor(self, name: str) -> torch.Tensor:
        return self._load(self._homes[name])[name]

    def region(self, name: str) -> None:
        return None

    def files(self) -> Mapping[str, Path | bytes]:
        return dict(carried_files(self.path))

    @property
    def size_bytes(self) -> int:
        return sum((self.path / shard).stat().st_size for shard in self._shards)

    @property
    def peak_bytes(self) -> int:
        # A file of the old format is read whole, and its largest tensor may be all of it.
        return 3 * max((self.path / shard).stat().st_size for shard in self._shards)

    @cached_property
    def _homes(self) -> dict[str, str]:
        """Tensor name → file, in the order of the files."""
        homes: dict[str, str] = {}
        index = read_json(self.path / INDEX).get("weight_map")
        for shard in self._shards:
            for name in self._load(shard):
                if name in homes:
                    raise DataError(
                        "tensor-twice",
                        f"tensor {name!r} occurs in two shards",
                        why=f"{homes[name]} and {shard} both contain it",
                    )
                homes[name] = shard
        if isinstance(index, dict) and (wrong := {n for n, s in index.items() if homes.get(n) != s}):
            name = min(wrong)
            raise DataError(
                "index-disagrees",
                f"{INDEX} and {index[name]} disagree",
                why=f"the index has tensor {name!r} in {index[name]}, it is in {homes.get(name, 'no file')}",
            )
        return homes

    def _find_shards(self) -> tuple[str, ...]:
        weight_map = read_json(self.path / INDEX).get("weight_map")
        if isinstance(weight_map, dict):
            shards = sorted({str(v) for v in weight_map.values()})
            for shard in shards:
                check_relative(shard, INDEX)
        elif (self.path / SINGLE).is_file():
            shards = [SINGLE]
        else:
            raise DataError(
                "weights-missing",
                f"{self.path} has no weights",
                why=f"neither {SINGLE} nor {INDEX} is there",
                hint="give the directory that holds config.json and the weights",
            )
        for shard in shards:
            if not (self.path / shard).is_file():
                raise DataError(
                    "shard-missing",
                    f"{shard} does not exist",
                    why=f"{INDEX} names it",
                    hint="get the file from where the checkpoint came from",
                )
        return tuple(shards)

    def _load(self, shard: str) -> dict[str, torch.Tensor]:
        if self._open[0] != shard:
            self._open = ("", {})  # let go of the last file before the next is read
            self._open = (shard, load_weights_only(self.path / shard))
        return self._open[1]


def load_weights_only(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a torch file, mapped rather than read where its format allows.

    Raises DataError `pickle-runs-code` naming what it wants to call, `pickle-damaged`.
    """
    import torch

    try:
        loaded = _torch_load(path)
    except pickle.UnpicklingError as error:
        wants = _WANTED.search(str(error))
        if wants is None:
            raise _damaged(path, str(error)) from error
        raise DataError(
            "pickle-runs-code",
            f"{path.name} is refused: loading it would run code",
            why=f"its pickle wants {wants[1]}, weights need only tensors and containers",
            hint="get the checkpoint as safetensors, or from a source that you trust",
        ) from error
    except _BROKEN as error:
        raise _damaged(path, str(error)) from error
    state = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise _damaged(path, f"expected a dictionary of tensors, got {type(state).__name__}")
    return {str(name): tensor for name, tensor in state.items()}


def _torch_load(path: Path) -> Any:
    import torch

    with path.open("rb") as stream:
        zipped = stream.read(4) == b"PK\x03\x04"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about pickle protocols: what matters is raised
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped or None)


def _damaged(path: Path, why: str) -> DataError:
    return DataError(
        "pickle-damaged",
        f"{path.name} cannot be read as torch weights",
        why=why.strip().split("\n")[0][:200],
        hint="get the file again from its source",
    )
