from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.artifact import (
    Artifact,
    FileRef,
    Kind,
    Manifest,
    canonical_json,
    hash_file,
    hash_tree,
    place,
    read_artifact,
    walk,
    write_manifest,
)
from delivery.errors import DataError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
DIGEST = st.text("0123456789abcdef", min_size=64, max_size=64)
MANIFESTS = st.builds(
    Manifest,
    kind=st.sampled_from(Kind),
    step=st.text(min_size=1, max_size=8),
    step_version=st.integers(0, 9),
    params=st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    inputs=st.dictionaries(st.text(max_size=5), DIGEST | st.lists(DIGEST, max_size=2).map(tuple), max_size=3),
    files=st.lists(
        st.builds(FileRef, path=st.text("ab/", min_size=1), sha256=DIGEST, size_bytes=st.integers(0)),
        max_size=3,
        unique_by=lambda f: f.path,
    ).map(tuple),
)


@given(MANIFESTS)
def test_a_manifest_survives_json(manifest):
    again = Manifest.from_json(json.loads(json.dumps(manifest.to_json())))
    assert again.digest == manifest.digest
    assert again.to_json() == manifest.to_json()


@given(MANIFESTS)
def test_the_order_of_files_does_not_name_an_artifact(manifest):
    turned = Manifest(
        **{**{f: getattr(manifest, f) for f in manifest.__slots__}, "files": manifest.files[::-1]}
    )
    assert turned.digest == manifest.digest


BASE = Manifest(Kind.ENGINE, "s", 1, {"p": 1}, {"in": "a" * 64}, (FileRef("f", "b" * 64, 1),))


@pytest.mark.parametrize(
    "changed",
    [
        Manifest(Kind.REPORT, "s", 1, {"p": 1}, {"in": "a" * 64}, BASE.files),
        Manifest(Kind.ENGINE, "t", 1, {"p": 1}, {"in": "a" * 64}, BASE.files),
        Manifest(Kind.ENGINE, "s", 2, {"p": 1}, {"in": "a" * 64}, BASE.files),
        Manifest(Kind.ENGINE, "s", 1, {"p": 2}, {"in": "a" * 64}, BASE.files),
        Manifest(Kind.ENGINE, "s", 1, {"p": 1}, {"in": "c" * 64}, BASE.files),
        Manifest(Kind.ENGINE, "s", 1, {"p": 1}, {"in": ("a" * 64,)}, BASE.files),
        Manifest(Kind.ENGINE, "s", 1, {"p": 1}, {"in": "a" * 64}, (FileRef("g", "b" * 64, 1),)),
        Manifest(Kind.ENGINE, "s", 1, {"p": 1}, {"in": "a" * 64}, (FileRef("f", "c" * 64, 1),)),
    ],
)
def test_everything_in_a_manifest_names_it(changed):
    assert changed.digest != BASE.digest


def test_a_digest_is_the_hash_of_the_canonical_json():
    assert BASE.digest == hashlib.sha256(canonical_json(BASE.to_json()).encode()).hexdigest()
    assert canonical_json({"b": 1, "a": [True, None, "ä"]}) == '{"a":[true,null,"ä"],"b":1}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_files_are_hashed_but_not_the_manifest_the_record_or_hidden_folders(tmp_path):
    for name in (
        "b",
        "a/c",
        "a.txt",
        "manifest.json",
        "run.json",
        "a/run.json",
        ".gitattributes",
        ".git/HEAD",
        ".cache/x",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [f.path for f in hash_tree(tmp_path)] == [".gitattributes", "a.txt", "a/c", "a/run.json", "b"]
    assert [name for name, _ in walk(tmp_path)] == [".gitattributes", "a.txt", "a/c", "a/run.json", "b"]
    assert hash_file(tmp_path / "b") == FileRef("b", hashlib.sha256(b"b").hexdigest(), 1)


def test_writing_and_reading(tmp_path):
    written = write_manifest(tmp_path, BASE)
    assert read_artifact(tmp_path) == written == Artifact(tmp_path, BASE)
    assert (written.kind, written.digest, written.file("f")) == (Kind.ENGINE, BASE.digest, tmp_path / "f")
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "engine"}', '{"kind": "toy", "step": "s"}'])
def test_a_damaged_manifest(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match="cannot be read") as caught:
        read_artifact(tmp_path)
    assert caught.value.code == "manifest-damaged"


def test_no_manifest(tmp_path):
    with pytest.raises(DataError, match="is not an artifact") as caught:
        read_artifact(tmp_path)
    assert caught.value.code == "not-an-artifact"


def test_placing_a_file(tmp_path, monkeypatch):
    source = tmp_path / "s"
    source.write_bytes(b"content")
    place(source, tmp_path / "deep" / "t")
    assert (tmp_path / "deep" / "t").read_bytes() == b"content"
    with pytest.raises(FileExistsError, match="deep/t"):
        place(source, tmp_path / "deep" / "t")
    monkeypatch.setattr("os.link", lambda *a: (_ for _ in ()).throw(OSError(18, "Invalid cross-device link")))
    place(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"content"
    assert (tmp_path / "copy").stat().st_ino != source.stat().st_ino
