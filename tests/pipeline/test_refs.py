from __future__ import annotations

import json

import pytest
from test_store import commit

from delivery.artifact import Kind, Manifest
from delivery.errors import DataError, EnvironmentLacking, UsageError
from delivery.pipeline.export import check_target, export
from delivery.pipeline.refs import is_external, resolve


def hf(folder, **files):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_path_prefix_and_tag_mean_the_same(store):
    a = commit(store, {"x": b"1"})
    store.tag("mine", a)
    assert resolve(store, str(a.path)) == resolve(store, a.digest[:6]) == resolve(store, "mine") == a
    assert resolve(store, a.digest, Kind.CHECKPOINT) == a


def test_what_a_reference_cannot_mean(store, tmp_path):
    a = commit(store, {"x": b"1"})
    store.tag("good", a)
    with pytest.raises(UsageError, match=r"(?s)is not an engine.*expected an engine, got a checkpoint"):
        resolve(store, a.digest, Kind.ENGINE)
    with pytest.raises(UsageError, match=r"(?s)there is no artifact 'god'.*did you mean 'good'"):
        resolve(store, "god")
    with pytest.raises(UsageError, match="there is no artifact"):
        resolve(store, a.digest[:3])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="neither an artifact nor a Hugging Face model directory"):
        resolve(store, str(tmp_path / "empty"))
    (tmp_path / "f.gguf").write_text("x")
    with pytest.raises(DataError, match=r"(?s)is a file.*deliver convert --model"):
        resolve(store, str(tmp_path / "f.gguf"))


def test_an_ambiguous_prefix_lists_what_it_means(store, monkeypatch):
    a, b = commit(store, {"x": b"1"}), commit(store, {"x": b"2"})
    twin = store.path_of(a.digest[:10] + "0" * 54)
    b.path.rename(twin)
    with pytest.raises(UsageError, match=r"(?s)matches 2 artifacts.*give more digits"):
        resolve(store, a.digest[:8])


def test_a_plain_model_directory_is_a_checkpoint(store, tmp_path):
    plain = hf(tmp_path / "hf", **{"model.safetensors": "weights"})
    (plain / ".git").mkdir()
    (plain / ".git" / "HEAD").write_text("ref")
    a = resolve(store, str(plain), Kind.CHECKPOINT)
    assert is_external(a)
    assert [f.path for f in a.manifest.files] == ["config.json", "model.safetensors"]
    assert sorted(p.name for p in plain.iterdir()) == [".git", "config.json", "model.safetensors"]
    (plain / "model.safetensors").write_text("weightz")
    assert resolve(store, str(plain)).digest != a.digest


def test_an_artifact_edited_by_hand_is_refused_until_its_manifest_goes(store, tmp_path):
    made = export(store, commit(store, {"config.json": b'{"rope_theta": 1}'}), tmp_path / "out")
    made.file("config.json").write_text('{"rope_theta": 2}')
    with pytest.raises(
        DataError, match=r"(?s)checksum of config.json differs.*remove .*manifest.json"
    ) as caught:
        resolve(store, str(made.path))
    assert caught.value.code == "artifact-damaged"
    made.file("manifest.json").unlink()
    assert is_external(resolve(store, str(made.path)))


def test_a_manifest_that_is_none(store, tmp_path):
    plain = hf(tmp_path / "m")
    (plain / "manifest.json").write_text(json.dumps({"files": 3}))
    with pytest.raises(DataError, match="cannot be read"):
        resolve(store, str(plain))


def test_export_copies_small_files_and_shares_large_ones(store, tmp_path):
    a = commit(store, {"config.json": b"{}", "big/w.bin": bytes(2 << 20)})
    made = export(store, a, tmp_path / "deep" / "out")
    assert (made.digest, made.path) == (a.digest, tmp_path / "deep" / "out")
    assert resolve(store, str(made.path)) == made
    made.file("config.json").write_text("edited")
    assert a.file("config.json").read_bytes() == b"{}"
    assert [p.name for p in made.path.parent.iterdir()] == ["out"]


def test_export_replaces_only_what_deliver_made(store, tmp_path):
    a, b = commit(store, {"x": b"1"}), commit(store, {"y": b"2"})
    out = tmp_path / "out"
    out.mkdir()
    export(store, a, out)
    export(store, b, out)
    assert sorted(p.name for p in out.iterdir()) == ["manifest.json", "run.json", "y"]
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "f").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for target in ("precious", "file"):
        with pytest.raises(UsageError, match="exists and is not an artifact") as caught:
            export(store, a, tmp_path / target)
        assert caught.value.code == "out-exists"
    assert (tmp_path / "precious" / "f").read_text() == "mine"


def test_an_empty_artifact_can_be_exported(store, tmp_path):
    with store.building() as out:
        a = store.commit(out, Manifest(Kind.CALIBRATION, "t", 1), {})
    assert export(store, a, tmp_path / "out").path.is_dir()


def test_a_target_that_can_never_be_made_is_told_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="file is a file") as caught:
        check_target(tmp_path / "file" / "below" / "out")
    assert caught.value.code == "out-unusable"
    check_target(tmp_path / "new" / "out")
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(EnvironmentLacking, match="no permission to write to"):
        check_target(tmp_path / "new" / "out")
