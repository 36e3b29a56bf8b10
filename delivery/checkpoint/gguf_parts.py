"""A GGUF model in several files, as llama.cpp's `gguf-split` writes it: NAME-00001-of-00003.gguf and so on.

The first file holds the metadata; each holds some of the tensors.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from delivery.checkpoint.gguf_file import GgufFile
from delivery.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufParts:
    """The model that one GGUF file is, or is a part of; read as one `GgufFile`.

    Raises DataError `shard-missing`, `tensor-twice`, and what `GgufFile` raises.
    """

    def __init__(self, path: Path) -> None:
        paths = parts_of(path)
        self.path = paths[0]
        self._files = [GgufFile(part) for part in paths]
        self.metadata = self._files[0].metadata
        stated = self.metadata.get("split.count", 1)
        if stated not in (0, 1, len(paths)):
            raise DataError(
                "shard-missing",
                f"{self.path.name} is one of {stated} files",
                why=f"found {len(paths)} of them by their names",
                hint=f"put all of them side by side, named {path.stem}-00001-of-{stated:05}.gguf and so on",
            )
        self._homes: dict[str, GgufFile] = {}
        for file in self._files:
            for name in file.tensors:
                if name in self._homes:
                    raise DataError(
                        "tensor-twice",
                        f"tensor {name!r} occurs in two files",
                        why=f"{self._homes[name].path.name} and {file.path.name} both contain it",
                    )
                self._homes[name] = file
        self.tensors = {name: file.tensors[name] for name, file in self._homes.items()}

    def __enter__(self) -> GgufParts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for file in self._files:
            file.__exit__(kind, error, trace)

    def read(self, name: str) -> NDArray[Any]:
        """See `GgufFile.read`."""
        return self._homes[name].read(name)


def parts_of(path: Path) -> list[Path]:
    """All files of the model that `path` belongs to, in their order; itself where its name says nothing.

    Raises DataError `shard-missing`.
    """
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    stem, count = named["stem"], int(named["count"])
    paths = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [part for part in paths if not part.is_file()]:
        raise DataError(
            "shard-missing",
            f"{missing[0].name} does not exist",
            why=f"{path.name} is one of {count} files, {len(missing)} are missing",
            hint="get the file from where the checkpoint came from",
        )
    return paths or [path]
