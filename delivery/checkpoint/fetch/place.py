"""Where fetched models lie, one lock for each, and files that arrive in pieces."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from delivery.artifact import read_hash
from delivery.errors import DataError, EnvironmentLacking

PIECE_BYTES = 16 << 20


def cache_folder() -> Path:
    """$DELIVER_CACHE, or ~/.cache/deliver."""
    stated = os.environ.get("DELIVER_CACHE")
    return Path(stated) if stated else Path.home() / ".cache" / "deliver"


def slot(folder: Path, name: str) -> Path:
    """A folder of its own for one model, named readably and by the SHA-256 of what names it."""
    words = "".join(c if c.isalnum() else "-" for c in name.split("://")[-1]).strip("-")[:60]
    return folder / f"{words}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time; a second waits and then finds the work done."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


class Ledger:
    """What of a model has arrived, and in which version: a small file beside its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder.parent / f"{folder.name}.json"

    def arrived(self, name: str, version: str) -> bool:
        """Whether this file came whole in this version, in this attempt or an earlier one."""
        return self._read()["files"].get(name) == version and (self._folder / name).is_file()

    def note(self, name: str, version: str) -> None:
        state = self._read()
        state["files"][name] = version
        self._write(state)

    def finish(self, digests: Mapping[str, str]) -> None:
        """Everything is there."""
        self._write({"files": self._read()["files"], "whole": dict(digests)})

    def whole(self) -> dict[str, str] | None:
        """The digests under which everything came; None where something is missing."""
        found: dict[str, str] | None = self._read()["whole"]
        return found if self._folder.is_dir() else None

    def _read(self) -> dict[str, Any]:
        if not self._path.is_file():
            return {"files": {}, "whole": None}
        state: dict[str, Any] = json.loads(self._path.read_text("utf-8"))
        return state

    def _write(self, state: Mapping[str, Any]) -> None:
        temporary = self._path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(state, indent=1), "utf-8")
        os.replace(temporary, self._path)


def receive(
    target: Path,
    size_bytes: int,
    read: Callable[[int, int], bytes],
    *,
    version: str = "",
    sha256: str | None = None,
) -> None:
    """Bring a file here in pieces; what an earlier attempt left of the same version is kept.

    read(start, end) gives those bytes of the source. Raises DataError `download-damaged` where the
    result has another size or SHA-256 than was said, EnvironmentLacking `disk-full` beforehand.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    tag = hashlib.sha256(f"{version} {size_bytes} {sha256}".encode()).hexdigest()[:12]
    part = target.with_name(f"{target.name}.{tag}.part")
    have = part.stat().st_size if part.is_file() else 0
    if have > size_bytes:
        part.unlink()
        have = 0
    check_space(target.parent, size_bytes - have)
    with part.open("ab") as stream:
        while have < size_bytes:
            piece = read(have, min(have + PIECE_BYTES, size_bytes))
            if not piece:
                raise _damaged(target.name, f"the source ends at {have} of {size_bytes} bytes")
            stream.write(piece)
            have += len(piece)
    if have != size_bytes or not _matches(part, sha256):
        found = read_hash(part).sha256
        part.unlink()
        raise _damaged(target.name, f"expected SHA-256 {sha256} and {size_bytes} bytes, got {found}, {have}")
    os.replace(part, target)


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises EnvironmentLacking `disk-full` where the disk has less room than is needed."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise EnvironmentLacking(
            "disk-full",
            f"{folder} has too little space",
            why=f"{needed_bytes} bytes are needed, {free} are free",
            hint="free space, or use another --download-dir",
        )


def _matches(path: Path, sha256: str | None) -> bool:
    return sha256 is None or read_hash(path).sha256 == sha256


def _damaged(name: str, why: str) -> DataError:
    return DataError(
        "download-damaged",
        f"{name} is not the file that was expected",
        why=why,
        hint="run the same command again",
    )
