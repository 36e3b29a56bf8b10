"""The artifact store of a workdir: content-addressed, safe against kills and against two runs at once.

    objects/ab/cdef…      file contents by SHA-256, stored once, read-only
    artifacts/<digest>/   complete artifacts; their files are reflinks or hard links of objects
    keys/<key>.json       cache key → artifact
    tags/<name>           a name for a digest
    tmp/ scratch/ locks/  work in progress
    runs/                 event logs; `runs/latest` names the last run
    latest/ reports/      latest results by stage, for users and CI

Everything is written by renaming, so a kill leaves it either complete or absent.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from delivery.artifact import (
    RUN_RECORD,
    Artifact,
    FileRef,
    Json,
    Manifest,
    hash_file,
    place,
    read_artifact,
    remembered_hashes,
    walk,
    write_manifest,
)
from delivery.errors import DataError, UsageError, environment_error
from delivery.pipeline.hashes import HashMemo
from delivery.pipeline.locks import locked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_DIGEST = re.compile(r"[0-9a-f]{64}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Store:
    """The store in a workdir. Creating one touches no file; the first write creates the folders.

    With `read_only`, not even the cache of hashes is written. Raises UsageError `workdir-unusable`.
    """

    def __init__(self, workdir: Path, *, read_only: bool = False) -> None:
        self.workdir = Path(workdir)
        around = next((p for p in (self.workdir, *self.workdir.absolute().parents) if p.exists()), None)
        if around is not None and not around.is_dir():
            raise UsageError(
                "workdir-unusable",
                f"{self.workdir} cannot be a workdir",
                why=f"{around} is a file",
                hint="choose another --workdir",
            )
        self.memo = HashMemo(self.workdir / "hashes.sqlite", read_only=read_only)

    # -- places -------------------------------------------------------------------------------

    def folder(self, name: str) -> Path:
        """A folder of the workdir, created if it is missing."""
        path = self.workdir / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def path_of(self, digest: str) -> Path:
        return self.workdir / "artifacts" / digest

    def object_path(self, sha256: str) -> Path:
        return self.workdir / "objects" / sha256[:2] / sha256[2:]

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Inside the context, digests of unchanged files are not computed again."""
        with remembered_hashes(self.memo):
            yield

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Block `gc` in other processes; any number of runs may hold this lock.

        Raises UsageError `workdir-unusable` if the workdir cannot be created.
        """
        try:
            self.workdir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if environment_error(error) is not None:
                raise
            raise UsageError(
                "workdir-unusable",
                f"{self.workdir} cannot be a workdir",
                why=f"it cannot be created: {error.strerror}",
                hint="choose another --workdir",
            ) from error
        with locked(self.workdir / "locks" / "store", shared=True):
            yield

    @contextmanager
    def key_lock(self, key: str, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
        """Lock so that only one run at a time does the work of a cache key."""
        with locked(self.workdir / "locks" / key, on_wait=on_wait):
            yield

    @contextmanager
    def building(self) -> Iterator[Path]:
        """An empty folder to build an artifact in; anything left in it afterwards is removed."""
        path = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=self.folder("tmp")))
        try:
            (path / "out").mkdir()  # not `path` itself, which only its owner may read
            yield path / "out"
        finally:
            shutil.rmtree(path, ignore_errors=True)

    # -- artifacts ----------------------------------------------------------------------------

    def commit(self, out: Path, manifest: Manifest, record: Mapping[str, Json]) -> Artifact:
        """Turn the folder `out` (inside the workdir) into an artifact; `out` no longer exists afterwards.

        `manifest.files` is filled in here; `record` becomes `run.json`. If an equal artifact exists already,
        it is kept.
        """
        with self.remembering():
            files = tuple(self._intern(name, path) for name, path in walk(out))
        whole = replace(manifest, files=files)
        (out / RUN_RECORD).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
        write_manifest(out, whole)
        made = Artifact(self.path_of(whole.digest), whole)
        made.path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            try:
                out.rename(made.path)
            except OSError:
                if not made.path.is_dir():
                    raise
                if self._readable(made.path) and self.damage(made) is None:
                    shutil.rmtree(out)
                    return made
                self.discard(made)
            else:
                return made
        raise OSError(f"{made.path} cannot be replaced")

    def _intern(self, name: str, path: Path) -> FileRef:
        """Store a file's content once and make `path` a link to it."""
        if path.is_symlink():
            content = path.resolve()
            path.unlink()
            shutil.copyfile(content, path)
        ref = hash_file(path)
        stored = self.object_path(ref.sha256)
        if stored.exists() and not self._is(stored, ref.sha256):
            stored.unlink()  # damaged since it was stored
        if not stored.exists():
            path.chmod(0o444)
            stored.parent.mkdir(parents=True, exist_ok=True)
            beside = stored.with_name(f".{stored.name}.{os.getpid()}")
            place(path, beside)
            os.replace(beside, stored)
        elif not stored.samefile(path):
            beside = path.with_name(f".{path.name}.link")
            place(stored, beside)
            os.replace(beside, path)
        for settled in (stored, path):
            settled.chmod(0o444)
            self.memo.put(settled, ref.sha256, settled=True)
        return FileRef(name, ref.sha256, ref.size_bytes)

    def _is(self, path: Path, sha256: str) -> bool:
        with self.remembering():
            return hash_file(path).sha256 == sha256

    def damage(self, artifact: Artifact) -> str | None:
        """A description of the first file that does not match the manifest; None if all match.

        A file is read again only if its size, time or inode changed since it was last read.
        """
        for ref in artifact.manifest.files:
            path = artifact.file(ref.path)
            if not path.is_file():
                return f"{ref.path} is missing"
            if (size := path.stat().st_size) != ref.size_bytes:
                return f"{ref.path} has {size} bytes instead of {ref.size_bytes}"
            if not self._is(path, ref.sha256):
                return f"the checksum of {ref.path} differs from its manifest"
        return None

    def discard(self, artifact: Artifact) -> None:
        """Remove an artifact of the store and those of its objects that are damaged."""
        with self.building() as away, suppress(FileNotFoundError):
            artifact.path.rename(away / "gone")
        for ref in artifact.manifest.files:
            stored = self.object_path(ref.sha256)
            if stored.exists() and not self._is(stored, ref.sha256):
                stored.unlink()

    def artifacts(self) -> Iterator[Artifact]:
        """Every artifact of the store."""
        folder = self.workdir / "artifacts"
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if (artifact := self._readable(path)) is not None:
                yield artifact

    def unreadable(self) -> list[Path]:
        """Artifact folders without a complete manifest."""
        folder = self.workdir / "artifacts"
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        return [path for path in paths if self._readable(path) is None]

    def find(self, digest: str) -> Artifact | None:
        """The artifact with this full digest; None if the store lacks it or it is damaged."""
        artifact = self._readable(self.path_of(digest))
        return None if artifact is None or self.damage(artifact) is not None else artifact

    def run_record(self, artifact: Artifact) -> dict[str, Json]:
        """An artifact's `run.json`: facts about the run that made it; {} if it has none."""
        try:
            record: dict[str, Json] = json.loads(artifact.file(RUN_RECORD).read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return record

    # -- the cache ----------------------------------------------------------------------------

    def cached(self, key: str) -> Artifact | None:
        """The artifact of a cache key, if it exists; its files may be damaged."""
        entry = self.key_record(key)
        return None if entry is None else self._readable(self.path_of(entry["artifact"]))

    @staticmethod
    def _readable(path: Path) -> Artifact | None:
        """The artifact in a folder of the store; None if a power failure left no complete manifest."""
        try:
            artifact = read_artifact(path)
        except DataError:
            return None
        return artifact if artifact.digest == path.name else None

    def key_record(self, key: str) -> dict[str, Json] | None:
        """What is known about a cache key: `artifact` (a digest) and `parts` (what the key was made of)."""
        try:
            entry: dict[str, Json] = json.loads((self.workdir / "keys" / f"{key}.json").read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return entry

    def remember_key(self, key: str, artifact: Artifact, parts: Mapping[str, Json]) -> None:
        text = json.dumps({"artifact": artifact.digest, "parts": parts}, indent=1, ensure_ascii=False)
        write_whole(self.folder("keys") / f"{key}.json", text + "\n")

    # -- names --------------------------------------------------------------------------------

    def tags(self) -> dict[str, str]:
        """Tag → digest."""
        folder = self.workdir / "tags"
        names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        return {n: (folder / n).read_text("utf-8").strip() for n in names if _TAG.fullmatch(n)}

    def tag(self, name: str, artifact: Artifact) -> None:
        """Name an artifact of this store. Raises UsageError `bad-tag`, `not-in-store`."""
        if not _TAG.fullmatch(name) or _DIGEST.fullmatch(name):
            raise UsageError(
                "bad-tag",
                f"{name!r} cannot be a tag",
                why="a tag consists of letters, digits, '.', '_' and '-'",
            )
        if not self.path_of(artifact.digest).is_dir():
            raise UsageError(
                "not-in-store",
                f"{artifact.path} is not in the store {self.workdir}",
                why="a tag protects an artifact of the store from `gc`",
                hint="deliver ls",
            )
        write_whole(self.folder("tags") / name, artifact.digest + "\n", durable=True)

    def untag(self, name: str) -> None:
        """Raises UsageError `unknown-tag`."""
        if name not in self.tags():
            raise UsageError("unknown-tag", f"there is no tag {name!r}", hint="deliver ls")
        (self.workdir / "tags" / name).unlink()


def write_whole(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a small file atomically: after a kill it is either complete or absent.

    With `durable` also after a power failure, at the cost of a flush, which reproducible files do not need.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as stream:
        stream.write(text)
        if durable:
            stream.flush()
            os.fsync(stream.fileno())
    os.replace(beside, path)
