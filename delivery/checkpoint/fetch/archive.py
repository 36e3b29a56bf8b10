"""Archives of models: every member becomes a regular file inside the target, or the archive is refused."""

from __future__ import annotations

import lzma
import posixpath
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any

from delivery.checkpoint.fetch.place import check_space
from delivery.errors import DataError

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_CHUNK_BYTES = 1 << 22
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, KeyError)
_BROKEN = (*_DAMAGED, RecursionError, RuntimeError, ValueError)
"""What the libraries raise: for damage; and for links in a circle, encryption, names that are not text."""


def is_archive(name: str) -> bool:
    return name.endswith(SUFFIXES)


def extract(archive: Path, target: Path) -> None:
    """Unpack into `target`. Links inside the archive become copies of what they point to.

    Raises DataError `path-escapes` for a member or link that leaves the archive, `archive-damaged`;
    EnvironmentLacking `disk-full` before anything is written.
    """
    try:
        if zipfile.is_zipfile(archive):
            _extract_zip(archive, target)
        else:
            _extract_tar(archive, target)
    except _BROKEN as error:
        raise DataError(
            "archive-damaged",
            f"{archive.name} cannot be unpacked",
            why=str(error),
            hint="get the archive again from its source",
        ) from error


def inside(name: str, archive: str) -> str:
    """A member's name, normalised. Raises DataError `path-escapes`."""
    normal = posixpath.normpath(name.replace("\\", "/"))
    if normal.startswith(("/", "../")) or normal == ".." or ":" in normal.split("/")[0] or "\0" in name:
        raise DataError(
            "path-escapes",
            f"{archive} contains a path outside itself",
            why=f"got {name!r:.120}",
            hint="do not use this file; get it from a source that you trust",
        )
    return normal


def _extract_tar(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
        _read_to_end(tar.fileobj)
        for member in members:
            inside(member.name, archive.name)
            if member.issym():
                inside(str(PurePosixPath(member.name).parent / member.linkname), archive.name)
            elif member.islnk():
                inside(member.linkname, archive.name)
            elif not (member.isfile() or member.isdir()):
                raise DataError(
                    "path-escapes",
                    f"{archive.name} holds {member.name!r}, which is not a regular file",
                    why="a device, pipe or socket has no place in a model",
                )
        check_space(target.parent, sum(m.size for m in members))
        for member in members:
            if not member.isdir():
                _write(target / inside(member.name, archive.name), lambda m=member: tar.extractfile(m))  # type: ignore[misc]


def _read_to_end(stream: Any) -> None:
    """The checksum of a gzip file stands behind its data, and tar stops reading before it."""
    while stream.read(_CHUNK_BYTES):
        pass


def _extract_zip(archive: Path, target: Path) -> None:
    with zipfile.ZipFile(archive) as packed:
        members = packed.infolist()
        for member in members:
            inside(member.filename, archive.name)
            if stat.S_ISLNK(member.external_attr >> 16):
                linked = packed.read(member)[:4096].decode("utf-8", "replace")
                inside(str(PurePosixPath(member.filename).parent / linked), archive.name)
        check_space(target.parent, sum(m.file_size for m in members))
        for member in members:
            if not member.is_dir():
                name = inside(member.filename, archive.name)
                _write(target / name, lambda m=member: packed.open(_linked(packed, m)))  # type: ignore[misc]


def _linked(packed: zipfile.ZipFile, member: zipfile.ZipInfo) -> zipfile.ZipInfo:
    if not stat.S_ISLNK(member.external_attr >> 16):
        return member
    linked = packed.read(member).decode("utf-8")
    return packed.getinfo(posixpath.normpath(str(PurePosixPath(member.filename).parent / linked)))


def _write(path: Path, opened: Callable[[], IO[bytes] | None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    reader = opened()
    if reader is None:
        raise KeyError(f"{path.name} points to nothing in the archive")
    with reader, path.open("wb") as writer:
        shutil.copyfileobj(reader, writer, _CHUNK_BYTES)
