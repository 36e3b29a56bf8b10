from __future__ import annotations

import hashlib
import os
import sqlite3
import time

import pytest

from delivery.artifact import hash_file, remembered_hashes
from delivery.pipeline.hashes import SETTLED_NS, HashMemo


@pytest.fixture
def memo(tmp_path):
    made = HashMemo(tmp_path / "hashes.sqlite")
    yield made
    made.close()


def settle(path):
    """Let the file look old enough that its time would have moved if it had changed."""
    old = path.stat().st_mtime_ns - 10 * SETTLED_NS
    os.utime(path, ns=(old, old))
    return old


def test_an_unchanged_file_is_read_once(tmp_path, memo, monkeypatch):
    path = tmp_path / "f"
    path.write_bytes(b"one")
    settle(path)
    reads = []
    real = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda *a: reads.append(1) or real(*a))
    with remembered_hashes(memo):
        assert hash_file(path).sha256 == real(b"one").hexdigest()
        assert hash_file(path).sha256 == real(b"one").hexdigest()
    assert len(reads) == 1
    hash_file(path)  # outside the block, nothing is remembered
    assert len(reads) == 2


def test_each_sign_of_change_is_seen(tmp_path, memo):
    path = tmp_path / "f"
    path.write_bytes(b"one")
    when = settle(path)
    with remembered_hashes(memo):
        first = hash_file(path).sha256
        path.write_bytes(b"three")  # another size
        os.utime(path, ns=(when, when))
        assert hash_file(path).sha256 == hashlib.sha256(b"three").hexdigest()
        path.write_bytes(b"eerht")  # another time
        assert hash_file(path).sha256 == hashlib.sha256(b"eerht").hexdigest()
        other = tmp_path / "other"
        other.write_bytes(b"two")  # another inode, with the size and time of the first
        os.utime(other, ns=(when, when))
        os.replace(other, path)
        assert hash_file(path).sha256 == hashlib.sha256(b"two").hexdigest() != first


def test_a_file_that_changed_just_now_is_not_trusted(tmp_path, memo):
    path = tmp_path / "f"
    path.write_bytes(b"one")
    soon = time.time_ns() + 10**11  # this test may be slow, the file stays new
    os.utime(path, ns=(soon, soon))
    with remembered_hashes(memo):
        hash_file(path)
        assert memo.get(path) is None
        memo.put(path, "ab" * 32, settled=True)  # its writer is done with it
        assert hash_file(path).sha256 == "ab" * 32


def test_a_damaged_database_is_replaced(tmp_path, memo):
    (tmp_path / "hashes.sqlite").write_bytes(b"not a database at all" * 100)
    path = tmp_path / "f"
    path.write_bytes(b"one")
    settle(path)
    memo.put(path, "cd" * 32)
    assert memo.get(path) == "cd" * 32


def test_no_database_is_no_error(tmp_path):
    memo = HashMemo(tmp_path / "no" / "folder" / "h.sqlite")
    path = tmp_path / "f"
    path.write_bytes(b"x")
    memo.put(path, "ab" * 32, settled=True)
    assert memo.get(path) is None


def test_read_only_writes_nothing(tmp_path, memo):
    path = tmp_path / "f"
    path.write_bytes(b"x")
    memo.put(path, "ab" * 32, settled=True)
    reader = HashMemo(tmp_path / "hashes.sqlite", read_only=True)
    assert reader.get(path) == "ab" * 32
    reader.put(path, "cd" * 32, settled=True)
    assert memo.get(path) == "ab" * 32
    reader.close()
    (tmp_path / "hashes.sqlite").write_bytes(b"damaged" * 100)
    assert HashMemo(tmp_path / "hashes.sqlite", read_only=True).get(path) is None
    assert (tmp_path / "hashes.sqlite").read_bytes().startswith(b"damaged")


def test_two_processes_may_write(tmp_path, memo):
    other = HashMemo(tmp_path / "hashes.sqlite")
    for i in range(50):
        path = tmp_path / f"f{i}"
        path.write_bytes(b"x")
        (memo if i % 2 else other).put(path, f"{i:064x}", settled=True)
    assert [memo.get(tmp_path / f"f{i}") for i in range(50)] == [f"{i:064x}" for i in range(50)]
    other.close()
    assert sqlite3.connect(tmp_path / "hashes.sqlite").execute("SELECT count(*) FROM hashes").fetchone() == (
        50,
    )
