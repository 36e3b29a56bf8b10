from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from delivery.artifact import Kind, Manifest, hash_file, read_artifact
from delivery.errors import UsageError
from delivery.pipeline.collect import gc, verify
from delivery.pipeline.events import RunLog
from delivery.pipeline.refs import resolve
from delivery.pipeline.store import Store

NAMES = st.text("abcdef", min_size=1, max_size=4)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
CONTENTS = st.sampled_from([b"", b"a", b"bb", b"c" * 3000])


def commit(store, files, **manifest):
    with store.building() as out:
        for name, content in files.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        made = Manifest(manifest.pop("kind", Kind.CHECKPOINT), "test", 1, **manifest)
        return store.commit(out, made, {"seconds": 1})


def inode(path):
    return path.stat().st_ino


def test_contents_are_stored_once(store):
    a = commit(store, {"x": b"same", "y": b"same", "z": b"other"})
    b = commit(store, {"w": b"same"})
    objects = [p for p in (store.workdir / "objects").rglob("*") if p.is_file()]
    assert len(objects) == 2
    # On a file system with reflinks the inodes differ and the bytes are shared all the same.
    if inode(a.file("x")) == inode(a.file("y")):
        assert (
            inode(a.file("x")) == inode(b.file("w")) == inode(store.object_path(a.manifest.files[0].sha256))
        )
    assert all(p.stat().st_mode & 0o222 == 0 for p in objects)
    assert not list((store.workdir / "tmp").iterdir())


def test_equal_work_is_one_artifact(store):
    a = commit(store, {"x": b"1"}, params={"p": 1})
    b = commit(store, {"x": b"1"}, params={"p": 1})
    c = commit(store, {"x": b"1"}, params={"p": 2})
    assert a.path == b.path != c.path
    assert read_artifact(a.path).digest == a.digest == a.path.name
    assert {x.digest for x in store.artifacts()} == {a.digest, c.digest}


def test_links_become_contents(store, tmp_path):
    (tmp_path / "outside").write_bytes(b"linked")
    with store.building() as out:
        (out / "l").symlink_to(tmp_path / "outside")
        made = store.commit(out, Manifest(Kind.ENGINE, "t", 1), {})
    assert not made.file("l").is_symlink()
    assert made.file("l").read_bytes() == b"linked"
    assert (tmp_path / "outside").stat().st_mode & 0o200  # the user's own file is left as it was


def test_works_without_hard_links(store, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EOPNOTSUPP, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    a = commit(store, {"x": b"1", "y": b"1"})
    assert store.damage(a) is None
    assert inode(a.file("x")) != inode(a.file("y"))


def test_damage_is_told_and_repaired(store):
    a = commit(store, {"x": b"good", "y": b"fine"})
    path = a.file("x")
    for change, words in (
        (lambda: path.unlink(), "x is missing"),
        (lambda: path.write_bytes(b"short"), "x has 5 bytes instead of 4"),
        (lambda: path.write_bytes(b"evil"), "the checksum of x differs from its manifest"),
    ):
        path.chmod(0o644)
        change()
        assert store.damage(a) == words
        store.discard(a)
        assert not a.path.exists()
        b = commit(store, {"x": b"good", "y": b"fine"})
        assert b.digest == a.digest
        assert store.damage(b) is None
        assert b.file("x").read_bytes() == b"good"


def test_a_damaged_object_is_not_handed_on(store):
    a = commit(store, {"x": b"good"})
    stored = store.object_path(a.manifest.files[0].sha256)
    stored.chmod(0o644)
    stored.write_bytes(b"evil")
    b = commit(store, {"y": b"good"})
    assert b.file("y").read_bytes() == b"good"
    assert store.damage(b) is None


def spoil(path):
    path.unlink()
    path.write_bytes(b"evil")


def test_equal_work_takes_the_place_of_a_damaged_artifact(store):
    a = commit(store, {"x": b"good"})
    spoil(a.file("x"))
    again = commit(store, {"x": b"good"})
    assert again.path == a.path
    assert again.file("x").read_bytes() == b"good"
    assert store.find(a.digest) == again


def test_a_folder_with_the_name_of_another_artifact_is_none(store):
    a = commit(store, {"x": b"1"})
    wrong = store.path_of("0" * 64)
    shutil.copytree(a.path, wrong)
    assert store.find(wrong.name) is None
    assert store.unreadable() == [wrong]
    assert list(store.artifacts()) == [a]


def test_damaged_objects_go_with_their_artifact(store):
    a = commit(store, {"x": b"good", "y": b"sound"})
    damaged, sound = (store.object_path(ref.sha256) for ref in a.manifest.files)
    spoil(damaged)
    store.discard(a)
    assert not a.path.exists()
    assert not damaged.exists()
    assert sound.read_bytes() == b"sound"


def test_keys_point_to_artifacts(store):
    assert store.cached("k") is None
    a = commit(store, {"x": b"1"})
    store.remember_key("k", a, {"step": "s"})
    assert store.cached("k") == a
    assert store.key_record("k") == {"artifact": a.digest, "parts": {"step": "s"}}
    (store.workdir / "keys" / "k.json").write_text("{half")
    assert store.cached("k") is None
    store.remember_key("k", a, {})
    store.discard(a)
    assert store.cached("k") is None


def test_tags(store, tmp_path):
    a = commit(store, {"x": b"1"})
    store.tag("v1.0-rc", a)
    assert store.tags() == {"v1.0-rc": a.digest}
    assert resolve(store, "v1.0-rc") == a
    for bad in ("", "-x", "a/b", "ä", a.digest):
        with pytest.raises(UsageError, match="cannot be a tag"):
            store.tag(bad, a)
    outside = tmp_path / "hf"
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="is not in the store"):
        store.tag("t", resolve(store, str(outside)))
    store.untag("v1.0-rc")
    with pytest.raises(UsageError, match="there is no tag"):
        store.untag("v1.0-rc")


def test_making_a_store_touches_nothing(tmp_path):
    store = Store(tmp_path / "w")
    assert list(store.artifacts()) == []
    assert store.tags() == {}
    assert store.cached("k") is None
    assert not store.workdir.exists()


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(PATHS, CONTENTS, max_size=6))
def test_any_tree_comes_back_as_it_was(files):
    # A path cannot be both a file and a folder.
    files = {p: c for p, c in files.items() if not any(q.startswith(f"{p}/") for q in files)}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        a = commit(store, files)
        assert {f.path: a.file(f.path).read_bytes() for f in a.manifest.files} == files
        assert {f.path: f for f in a.manifest.files} == {
            p: type(f)(p, hash_file(a.file(p)).sha256, len(files[p]))
            for p in files
            for f in a.manifest.files[:1]
        }
        verify(a)
        store.memo.close()


class Life(RuleBasedStateMachine):
    """Commits, tags, damage, repair and collection in any order: what is reached is always whole."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = Store(self.folder)
        self.made: dict[str, dict[str, bytes]] = {}
        self.parents: dict[str, tuple[str, ...]] = {}
        self.damaged: set[str] = set()

    def teardown(self) -> None:
        self.store.memo.close()
        shutil.rmtree(self.folder)

    def alive(self):
        return sorted(d for d in self.made if self.store.path_of(d).is_dir())

    @rule(files=st.dictionaries(NAMES, CONTENTS, max_size=3), p=st.integers(0, 2), pick=st.integers(0, 99))
    def commit(self, files, p, pick):
        alive = self.alive()
        parents = (alive[pick % len(alive)],) if alive and pick % 2 else ()
        a = commit(self.store, files, params={"p": p}, inputs={"from": parents} if parents else {})
        self.made[a.digest], self.parents[a.digest] = files, parents

    @rule(pick=st.integers(0, 99), name=NAMES)
    def tag(self, pick, name):
        if alive := self.alive():
            digest = alive[pick % len(alive)]
            self.store.tag(name, read_artifact(self.store.path_of(digest)))

    @rule(pick=st.integers(0, 99))
    def untag(self, pick):
        if tags := sorted(self.store.tags()):
            self.store.untag(tags[pick % len(tags)])

    @rule()
    def collect(self):
        before = set(self.alive())
        predicted = gc(self.store, dry_run=True)
        assert set(self.alive()) == before
        done = gc(self.store)
        assert done == predicted
        assert set(self.alive()) == before - {a.digest for a in done.artifacts}

    @rule(pick=st.integers(0, 99))
    def damage_and_repair(self, pick):
        candidates = [d for d in self.alive() if any(self.made[d].values())]
        if not candidates:
            return
        digest = candidates[pick % len(candidates)]
        artifact = read_artifact(self.store.path_of(digest))
        name = next(n for n, c in self.made[digest].items() if c)
        path = artifact.file(name)
        copy = path.read_bytes()
        path.unlink()
        path.write_bytes(b"?" + copy[1:])
        assert self.store.damage(artifact) is not None
        self.store.discard(artifact)
        parents = self.parents[digest]
        again = commit(
            self.store,
            self.made[digest],
            params=artifact.manifest.params,
            inputs={"from": parents} if parents else {},
        )
        assert again.digest == digest

    @invariant()
    def everything_there_is_whole(self):
        for digest in self.alive():
            artifact = read_artifact(self.store.path_of(digest))
            assert artifact.digest == digest
            assert {f.path: artifact.file(f.path).read_bytes() for f in artifact.manifest.files} == self.made[
                digest
            ]

    @invariant()
    def tags_keep_what_they_reach(self):
        queue = list(self.store.tags().values())
        while queue:
            digest = queue.pop()
            assert self.store.path_of(digest).is_dir()
            queue += self.parents[digest]


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)


def test_a_run_in_progress_holds_gc_off(store):
    from delivery.errors import EnvironmentLacking

    commit(store, {"x": b"1"})
    with store.in_use(), pytest.raises(EnvironmentLacking, match="a run is using"):
        gc(store)
    assert len(gc(store).artifacts) == 1


def test_gc_keeps_the_latest_run_and_the_latest_finished_one(store):
    made = [commit(store, {"x": bytes([i])}) for i in range(4)]
    for artifact, finished in ((made[0], True), (made[1], True), (made[2], False)):
        RunLog(store).record({"steps": [{"name": "s", "artifact": artifact.digest}]}, finished=finished)
    gone = {a.digest for a in gc(store).artifacts}
    assert gone == {made[0].digest, made[3].digest}


def test_gc_after_a_step_alone_keeps_the_release_before_it(store):
    release, other, again, old = (commit(store, {"x": bytes([i])}) for i in range(4))
    for steps in (
        {"build": old, "package": release},
        {"build": other, "package": release},
        {"build": again},
    ):
        entries = [{"name": name, "artifact": artifact.digest} for name, artifact in steps.items()]
        RunLog(store).record({"steps": entries}, finished=True)
    assert {a.digest for a in gc(store).artifacts} == {old.digest, other.digest}


def test_gc_removes_leftovers_but_not_half_done_work(store):
    a = commit(store, {"x": b"1"})
    store.tag("t", a)
    store.remember_key("done", a, {})
    for name in ("tmp/77-killed/out", "scratch/half", "scratch/done"):
        (store.workdir / name).mkdir(parents=True)
        (store.workdir / name / "f").write_bytes(b"123")
    store.remember_key("dangling", commit(store, {"y": b"2"}), {})
    garbage = gc(store)
    assert garbage.size_bytes > 6
    left = {str(p.relative_to(store.workdir)) for p in store.workdir.glob("*/*")}
    assert {"scratch/half", "keys/done.json"} <= left
    assert not left & {"tmp/77-killed", "scratch/done", "keys/dangling.json"}
    gc(store, scratch=True)
    assert not (store.workdir / "scratch/half").exists()
