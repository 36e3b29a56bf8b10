"""Artifacts: immutable directories named by their content.

An artifact is a directory with a `manifest.json`. The manifest holds no clock, host name or path,
so equal work gives an equal digest; what belongs to one run only goes into `run.json` next to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol

from delivery.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MANIFEST = "manifest.json"
RUN_RECORD = "run.json"
_UNHASHED = frozenset({MANIFEST, RUN_RECORD})
_CHUNK_BYTES = 1 << 22
_FICLONE = 0x40049409  # linux/fs.h

Json = Any
Digests = str | tuple[str, ...]


class Kind(StrEnum):
    """What an artifact is; steps declare the kinds that they take and make."""

    CHECKPOINT = "checkpoint"
    CALIBRATION = "calibration"
    ENGINE = "engine"
    REPORT = "report"
    BASELINE = "baseline"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class FileRef:
    """One file of an artifact: `path` is relative, with forward slashes."""

    path: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an artifact is and what it was made from.

    `params` are the step's parameters, `inputs` maps a role to the digest (or digests) of what it
    was made from, `step_version` is bumped when the same params give another output.
    """

    kind: Kind
    step: str
    step_version: int
    params: Mapping[str, Json] = field(default_factory=dict)
    inputs: Mapping[str, Digests] = field(default_factory=dict)
    files: tuple[FileRef, ...] = ()

    def to_json(self) -> dict[str, Json]:
        return {
            "kind": self.kind.value,
            "step": self.step,
            "step_version": self.step_version,
            "params": dict(self.params),
            "inputs": {r: list(d) if isinstance(d, tuple) else d for r, d in self.inputs.items()},
            "files": [
                {"path": f.path, "sha256": f.sha256, "size_bytes": f.size_bytes}
                for f in sorted(self.files, key=lambda f: f.path)
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Manifest:
        return cls(
            kind=Kind(data["kind"]),
            step=str(data["step"]),
            step_version=int(data["step_version"]),
            params=dict(data["params"]),
            inputs={r: tuple(d) if isinstance(d, list) else str(d) for r, d in data["inputs"].items()},
            files=tuple(
                FileRef(str(f["path"]), str(f["sha256"]), int(f["size_bytes"])) for f in data["files"]
            ),
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON: 64 hexadecimal digits."""
        return hashlib.sha256(canonical_json(self.to_json()).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Artifact:
    """A committed artifact: its directory and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def kind(self) -> Kind:
        return self.manifest.kind

    def file(self, name: str) -> Path:
        """The path of a file inside the artifact (not checked to exist)."""
        return self.path / name


def canonical_json(value: Json) -> str:
    """JSON with sorted keys, no spaces and no NaN: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


class HashMemo(Protocol):
    """Remembers digests of files that have not changed since they were read."""

    def get(self, path: Path) -> str | None: ...
    def put(self, path: Path, sha256: str, *, settled: bool = False) -> None: ...


_memo: ContextVar[HashMemo | None] = ContextVar("hash_memo", default=None)


@contextmanager
def remembered_hashes(memo: HashMemo) -> Iterator[None]:
    """Inside this block `hash_file` reads only files that `memo` does not know as they are."""
    token = _memo.set(memo)
    try:
        yield
    finally:
        _memo.reset(token)


def hash_file(path: Path) -> FileRef:
    """SHA-256 and size of one file; `path` in the result is the bare file name."""
    memo = _memo.get()
    known = memo.get(path) if memo else None
    if known is not None:
        return FileRef(path.name, known, path.stat().st_size)
    before = path.stat()
    ref = read_hash(path)
    after = path.stat()
    if memo and (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
        memo.put(path, ref.sha256)
    return ref


def read_hash(path: Path) -> FileRef:
    """As `hash_file`, but always reads the file."""
    digest = hashlib.sha256()
    size_bytes = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
    return FileRef(path.name, digest.hexdigest(), size_bytes)


def hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """File name without folders → SHA-256; a repeated name gets a prime (').

    Raises DataError `file-missing`.
    """
    found: dict[str, str] = {}
    for path in paths:
        if not path.is_file():
            why = "it is a folder" if path.is_dir() else "nothing is there"
            raise DataError("file-missing", f"there is no file {path}", why=why, hint="check the path")
        name = path.resolve().name
        while name in found:
            name += "'"
        found[name] = hash_file(path).sha256
    return found


def hash_tree(directory: Path) -> tuple[FileRef, ...]:
    """References to every file below `directory` but the manifest and the run record."""
    return tuple(
        FileRef(name, ref.sha256, ref.size_bytes)
        for name, path in walk(directory)
        for ref in (hash_file(path),)
    )


def write_manifest(directory: Path, manifest: Manifest) -> Artifact:
    """Write `manifest.json` whole or not at all, and return the artifact."""
    temporary = directory / f".{MANIFEST}.{os.getpid()}"
    temporary.write_text(json.dumps(manifest.to_json(), indent=1, ensure_ascii=False) + "\n", "utf-8")
    os.replace(temporary, directory / MANIFEST)
    return Artifact(directory, manifest)


def read_artifact(directory: Path) -> Artifact:
    """The artifact in `directory`.

    Raises DataError `not-an-artifact` or `manifest-damaged`.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise DataError(
            "not-an-artifact",
            f"{directory} is not an artifact",
            why=f"it has no {MANIFEST}",
            hint="deliver ls",
        )
    try:
        return Artifact(directory, Manifest.from_json(json.loads(path.read_text("utf-8"))))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "manifest-damaged",
            f"{path} cannot be read",
            why=f"{type(error).__name__}: {error}",
            hint="run the step that made it again with --force",
        ) from error


def walk(directory: Path) -> Iterator[tuple[str, Path]]:
    """Name and path of every file below `directory` that an artifact's digest covers, sorted by name.

    Left out: the manifest and the run record, and hidden folders (`.git`, say).
    """
    found = []
    for folder, folders, names in os.walk(directory):
        folders[:] = [f for f in folders if not f.startswith(".")]
        for path in (Path(folder) / name for name in names):
            relative = PurePosixPath(path.relative_to(directory)).as_posix()
            if relative not in _UNHASHED:
                found.append((relative, path))
    yield from sorted(found)


def place(source: Path, target: Path) -> None:
    """Make `target` a file with the content of `source`, without writing it twice where possible.

    In this order: reflink (a copy on write), hard link, copy. With a hard link the two share one
    inode, so give it only files that nobody writes to any more: files of artifacts.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if reflink(source, target):
        return
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def reflink(source: Path, target: Path) -> bool:
    """Clone `source` into the new file `target`; False where the file system cannot."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        return False
    with source.open("rb") as reader, target.open("xb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError:
            cloned = False
        else:
            cloned = True
    if not cloned:
        target.unlink()
    return cloned
