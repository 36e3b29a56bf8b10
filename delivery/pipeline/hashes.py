"""A cache of file digests by device, inode, size and modification time, so that no file is read twice.

It is kept in SQLite, which survives a kill and supports concurrent runs. It is only a cache: if it
cannot be read or written, files are hashed again.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# A file changed this recently could change again with the same time: file system clocks are coarse.
SETTLED_NS = 50_000_000


class HashMemo:
    """`get` and `put` digests; see `delivery.artifact.remembered_hashes`."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        self._read_only = read_only
        self._database: sqlite3.Connection | None = None

    def get(self, path: Path) -> str | None:
        """The digest of `path`, if known and the file's size, time and inode are unchanged."""
        with suppress(sqlite3.Error):
            row = (
                self._open()
                .execute(
                    "SELECT sha256 FROM hashes WHERE device=? AND inode=? AND size=? AND mtime_ns=?",
                    _identity(path),
                )
                .fetchone()
            )
            return None if row is None else str(row[0])
        return None

    def put(self, path: Path, sha256: str, *, settled: bool = False) -> None:
        """Store a digest. `settled`: nothing writes to the file any more."""
        identity = _identity(path)
        if self._read_only or (not settled and time.time_ns() - identity[3] < SETTLED_NS):
            return
        with suppress(sqlite3.Error), self._open() as database:
            database.execute("INSERT OR REPLACE INTO hashes VALUES (?, ?, ?, ?, ?)", (*identity, sha256))

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            try:
                self._database = self._connect()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) or self._read_only:
                    raise
                self._path.unlink(missing_ok=True)  # not a database: damaged, but only a cache
                self._database = self._connect()
        return self._database

    def _connect(self) -> sqlite3.Connection:
        if self._read_only:
            return sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=10)
        database = sqlite3.connect(self._path, timeout=10, check_same_thread=False)
        try:
            database.execute(
                "CREATE TABLE IF NOT EXISTS hashes (device INTEGER, inode INTEGER, size INTEGER,"
                " mtime_ns INTEGER, sha256 TEXT, PRIMARY KEY (device, inode)) WITHOUT ROWID"
            )
            database.execute("PRAGMA synchronous=OFF")
            database.execute("PRAGMA journal_mode=PERSIST")  # creating a journal each time is slow
        except sqlite3.Error:
            database.close()
            raise
        return database


def _identity(path: Path) -> tuple[int, int, int, int]:
    status = path.stat()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
