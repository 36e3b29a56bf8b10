"""Models that are not here yet: Hub, HTTP, S3 and OCI, against servers on this machine."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loopback import Site, add_hub, add_oci, serve, tar
from safetensors.torch import save

from delivery.checkpoint import Checkpoint
from delivery.checkpoint.fetch import locate
from delivery.checkpoint.fetch.place import receive
from delivery.errors import DataError, EnvironmentLacking, UsageError

CONFIG = json.dumps(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 8,
    }
).encode()
WEIGHTS = save({"model.embed_tokens.weight": torch.arange(64.0).reshape(8, 8)})
FILES = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}


def quiet(_text: str) -> None:
    return


@pytest.fixture
def site() -> Iterator[Site]:
    with serve(Site()) as running:
        yield running


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delivery.checkpoint.fetch.place.PIECE_BYTES", 100)


def shards(site: Site, root: str) -> None:
    """A sharded checkpoint below `root`."""
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    parts = [{"a": torch.ones(8)}, {"b": torch.zeros(8)}]
    index = {"weight_map": {n: s for s, p in zip(names, parts, strict=True) for n in p}}
    site.files[f"{root}/config.json"] = CONFIG
    site.files[f"{root}/model.safetensors.index.json"] = json.dumps(index).encode()
    for name, part in zip(names, parts, strict=True):
        site.files[f"{root}/{name}"] = save(part)


class TestHttp:
    def test_folder(self, site: Site, tmp_path: Path) -> None:
        site.files |= {f"/m/{n}": d for n, d in FILES.items()}
        model = locate(f"{site.url}/m", download_dir=str(tmp_path))
        path = model.fetch(quiet)
        assert {p.name: p.read_bytes() for p in path.iterdir()} == FILES
        assert Checkpoint.open(path).names() == ("model.embed_tokens.weight",)
        assert set(model.digests()) == set(FILES)
        assert hashlib.md5(CONFIG).hexdigest() in model.digests()["config.json"]

    def test_sharded_folder(self, site: Site, tmp_path: Path) -> None:
        shards(site, "/m")
        path = locate(f"{site.url}/m/", download_dir=str(tmp_path)).fetch(quiet)
        assert Checkpoint.open(path).names() == ("a", "b")

    def test_again_nothing_is_read(self, site: Site, tmp_path: Path) -> None:
        site.files |= {f"/m/{n}": d for n, d in FILES.items()}
        model = locate(f"{site.url}/m", download_dir=str(tmp_path))
        model.fetch(quiet)
        before = site.sent
        model.fetch(quiet)
        assert site.sent - before < 50  # answers that say "not there"

    def test_a_changed_source_is_fetched_anew(self, site: Site, tmp_path: Path) -> None:
        site.files |= {f"/m/{n}": d for n, d in FILES.items()}
        model = locate(f"{site.url}/m", download_dir=str(tmp_path))
        first = dict(model.digests())
        model.fetch(quiet)
        site.files["/m/config.json"] = CONFIG.replace(b'"hidden_size": 8', b'"hidden_size": 9')
        assert dict(model.digests()) != first
        assert b'"hidden_size": 9' in (model.fetch(quiet) / "config.json").read_bytes()

    @pytest.mark.usefixtures("small_pieces")
    def test_an_interrupted_download_continues(self, site: Site, tmp_path: Path) -> None:
        data = os.urandom(2000)
        site.files["/m.gguf"] = data
        site.cut_after = 950
        model = locate(f"{site.url}/m.gguf", download_dir=str(tmp_path))
        with pytest.raises(EnvironmentLacking, match="cannot be read") as caught:
            model.fetch(quiet)
        assert caught.value.code == "source-unreachable"
        assert not list(tmp_path.rglob("*.gguf"))
        site.cut_after, site.sent = None, 0
        assert model.fetch(quiet).read_bytes() == data
        assert site.sent == 1100

    @pytest.mark.usefixtures("small_pieces")
    def test_parts_of_another_version_are_not_continued(self, site: Site, tmp_path: Path) -> None:
        site.files["/m.gguf"], site.cut_after = b"a" * 1000, 450
        model = locate(f"{site.url}/m.gguf", download_dir=str(tmp_path))
        with pytest.raises(EnvironmentLacking, match="cannot be read"):
            model.fetch(quiet)
        site.files["/m.gguf"], site.cut_after = b"b" * 1000, None
        assert model.fetch(quiet).read_bytes() == b"b" * 1000

    def test_pinned_digest(self, site: Site, tmp_path: Path) -> None:
        site.files["/m.gguf"] = b"weights"
        good = hashlib.sha256(b"weights").hexdigest()
        model = locate(f"{site.url}/m.gguf#sha256={good}", download_dir=str(tmp_path))
        assert model.fetch(quiet).read_bytes() == b"weights"
        assert model.digests() == {"m.gguf": good}
        bad = locate(f"{site.url}/m.gguf#sha256={'0' * 64}", download_dir=str(tmp_path / "other"))
        with pytest.raises(DataError, match=r"m\.gguf is not the file that was expected") as caught:
            bad.fetch(quiet)
        assert good in caught.value.why
        assert not list((tmp_path / "other").rglob("m.gguf*"))

    def test_sums_file_is_held_against_the_files(self, site: Site, tmp_path: Path) -> None:
        site.files |= {f"/m/{n}": d for n, d in FILES.items()}
        site.files["/m/SHA256SUMS"] = f"{'0' * 64}  model.safetensors\n".encode()
        with pytest.raises(DataError, match=r"model\.safetensors is not the file"):
            locate(f"{site.url}/m", download_dir=str(tmp_path)).fetch(quiet)

    def test_index_with_a_path_that_leaves(self, site: Site, tmp_path: Path) -> None:
        shards(site, "/m")
        site.files["/m/model.safetensors.index.json"] = b'{"weight_map": {"a": "../../evil"}}'
        with pytest.raises(DataError, match="outside its own directory"):
            locate(f"{site.url}/m", download_dir=str(tmp_path)).fetch(quiet)

    def test_no_config(self, site: Site, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"has no config\.json") as caught:
            locate(f"{site.url}/m", download_dir=str(tmp_path)).fetch(quiet)
        assert caught.value.code == "source-incomplete"

    def test_offline_after_a_fetch_still_works(self, tmp_path: Path) -> None:
        with serve(Site()) as site:
            site.files |= {f"/m/{n}": d for n, d in FILES.items()}
            model = locate(f"{site.url}/m", download_dir=str(tmp_path))
            digests = dict(model.digests())
            path = model.fetch(quiet)
        model = locate(f"{site.url}/m", download_dir=str(tmp_path))
        assert (dict(model.digests()), model.fetch(quiet)) == (digests, path)

    def test_unreachable(self, tmp_path: Path) -> None:
        with pytest.raises(EnvironmentLacking, match="cannot be read"):
            locate("http://127.0.0.1:9/m", download_dir=str(tmp_path)).digests()

    def test_archive_over_http_with_a_folder_inside(self, site: Site, tmp_path: Path) -> None:
        site.files["/m.tar"] = tar([(f"folder/{n}", d) for n, d in FILES.items()])
        path = locate(f"{site.url}/m.tar", download_dir=str(tmp_path)).fetch(quiet)
        assert Checkpoint.open(path).names() == ("model.embed_tokens.weight",)


class TestS3:
    @pytest.fixture
    def bucket(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
        pytest.importorskip("s3fs")
        site.list_bucket = True
        monkeypatch.setenv("AWS_ENDPOINT_URL", site.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        return site

    def test_folder(self, bucket: Site, tmp_path: Path) -> None:
        bucket.files |= {f"/b/models/m/{n}": d for n, d in FILES.items()}
        bucket.files["/b/models/m/sub/extra.txt"] = b"x"
        model = locate("s3://b/models/m", download_dir=str(tmp_path))
        path = model.fetch(quiet)
        assert (path / "sub" / "extra.txt").read_bytes() == b"x"
        assert Checkpoint.open(path).size_bytes() == 256
        assert hashlib.md5(CONFIG).hexdigest() in model.digests()["config.json"]

    def test_empty_prefix(self, bucket: Site, tmp_path: Path) -> None:
        bucket.files["/b/other/x"] = b""
        with pytest.raises(DataError, match=r"has no config\.json"):
            locate("s3://b/models/m", download_dir=str(tmp_path)).fetch(quiet)


class TestOci:
    def reference(self, site: Site, rest: str) -> str:
        return f"oci://{site.url.removeprefix('http://')}/{rest}"

    @pytest.mark.parametrize("token", [None, "secret"])
    def test_titled_layers(self, token: str | None, site: Site, tmp_path: Path) -> None:
        site.token = token
        layers = [("application/octet-stream", d, n) for n, d in FILES.items()]
        digest = add_oci(site, "team/m", "v1", layers)
        model = locate(self.reference(site, "team/m:v1"), download_dir=str(tmp_path))
        assert list(model.digests().values()) == [digest]
        path = model.fetch(quiet)
        assert {p.name: p.read_bytes() for p in path.iterdir()} == FILES
        before = site.sent
        model.fetch(quiet)
        assert site.sent - before < 1000
        pinned = locate(self.reference(site, f"team/m@{digest}"), download_dir=str(tmp_path))
        assert Checkpoint.open(pinned.fetch(quiet)).names() == ("model.embed_tokens.weight",)

    def test_tar_layer(self, site: Site, tmp_path: Path) -> None:
        packed = tar([("config.json", CONFIG), ("sub/a", b"x")])
        layers = [
            ("application/vnd.oci.image.layer.v1.tar", packed, ""),
            ("application/octet-stream", WEIGHTS, "model.safetensors"),
        ]
        add_oci(site, "m", "latest", layers)
        path = locate(self.reference(site, "m"), download_dir=str(tmp_path)).fetch(quiet)
        assert sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()) == [
            "config.json",
            "model.safetensors",
            "sub/a",
        ]

    def test_a_blob_that_is_not_its_digest(self, site: Site, tmp_path: Path) -> None:
        add_oci(site, "m", "v1", [("application/octet-stream", WEIGHTS, "model.safetensors")])
        blob = next(p for p in site.files if "/blobs/" in p)
        site.files[blob] = WEIGHTS[:-1] + b"\1"
        with pytest.raises(DataError, match=r"model\.safetensors is not the file that was expected"):
            locate(self.reference(site, "m:v1"), download_dir=str(tmp_path)).fetch(quiet)
        assert not list(tmp_path.rglob("*.safetensors"))

    def test_a_manifest_that_is_not_its_digest(self, site: Site, tmp_path: Path) -> None:
        digest = add_oci(site, "m", "v1", [("application/octet-stream", b"x", "a")])
        site.files[f"/v2/m/manifests/{digest}"] += b" "
        with pytest.raises(DataError, match="is not what was requested"):
            locate(self.reference(site, f"m@{digest}"), download_dir=str(tmp_path)).fetch(quiet)

    def test_a_title_that_leaves(self, site: Site, tmp_path: Path) -> None:
        add_oci(site, "m", "v1", [("application/octet-stream", b"x", "../../evil")])
        with pytest.raises(DataError, match="a path outside itself"):
            locate(self.reference(site, "m:v1"), download_dir=str(tmp_path)).fetch(quiet)

    @pytest.mark.usefixtures("small_pieces")
    def test_an_interrupted_blob_continues(self, site: Site, tmp_path: Path) -> None:
        data = os.urandom(2000)
        add_oci(site, "m", "v1", [("application/octet-stream", data, "m.gguf")])
        site.cut_after = 1500
        model = locate(self.reference(site, "m:v1"), download_dir=str(tmp_path))
        with pytest.raises(EnvironmentLacking, match="cannot be read"):
            model.fetch(quiet)
        site.cut_after, site.sent = None, 0
        assert (model.fetch(quiet) / "m.gguf").read_bytes() == data
        assert site.sent < 2000

    def test_references_that_are_none(self) -> None:
        for reference in ("oci://", "oci://host", "oci://host/UPPER", "oci://h/n@sha256:12"):
            with pytest.raises(UsageError, match="is not an OCI reference"):
                locate(reference)

    def test_missing_artifact(self, site: Site, tmp_path: Path) -> None:
        with pytest.raises(EnvironmentLacking, match="cannot be read") as caught:
            locate(self.reference(site, "m:v1"), download_dir=str(tmp_path)).fetch(quiet)
        assert "404" in caught.value.why


class TestHub:
    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    @pytest.fixture
    def hub(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
        monkeypatch.setenv("HF_ENDPOINT", site.url)
        files = {**FILES, "pytorch_model.bin": b"not fetched", "tf_model.h5": b"nor this"}
        add_hub(site, "org/m", self.COMMIT, files)
        site.headers["404"] = {"X-Error-Code": "RepoNotFound"}
        return site

    def test_snapshot(self, hub: Site, tmp_path: Path) -> None:
        model = locate("org/m", download_dir=str(tmp_path))
        assert model.digests() == {"org/m": self.COMMIT}
        path = model.fetch(quiet)
        assert {p.name for p in path.iterdir()} == set(FILES)
        assert Checkpoint.open(path).names() == ("model.embed_tokens.weight",)
        assert not any("pytorch_model.bin" in seen and "resolve" in seen for seen in hub.seen)

    def test_offline_after_a_fetch(self, hub: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = locate("org/m", download_dir=str(tmp_path)).fetch(quiet)
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        for revision in (self.COMMIT, ""):
            model = locate("org/m", revision=revision, download_dir=str(tmp_path))
            assert model.digests() == {"org/m": self.COMMIT}
            assert model.fetch(quiet) == path

    def test_offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(EnvironmentLacking, match="the Hub cannot be reached for org/m") as caught:
            locate("org/m", download_dir=str(tmp_path)).digests()
        assert caught.value.code == "hub-unreachable"
        assert caught.value.why.startswith("http://127.0.0.1:9: ")
        assert "HF_ENDPOINT" in caught.value.hint

    def test_unknown_name(self, hub: Site, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="the Hub does not serve org/other at main") as caught:
            locate("org/other", download_dir=str(tmp_path)).fetch(quiet)
        assert caught.value.code == "hub-refuses"

    def test_damaged_file(self, hub: Site, tmp_path: Path) -> None:
        for path in list(hub.files):
            if path.endswith("resolve/" + self.COMMIT + "/model.safetensors"):
                hub.files[path] = WEIGHTS[:-1] + b"\1"
        with pytest.raises(DataError, match=r"model\.safetensors is not the file that was expected"):
            locate("org/m", download_dir=str(tmp_path)).fetch(quiet)


class TestLocal:
    def test_directory_and_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("x")
        sha = hashlib.sha256(b"x").hexdigest()
        assert locate(str(tmp_path)).digests() == {"a.txt": sha}
        assert locate(str(tmp_path / "a.txt")).digests() == {"a.txt": sha}
        assert locate(str(tmp_path)).local == tmp_path

    def test_what_is_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no model is given"):
            locate("")
        with pytest.raises(UsageError, match="there is no model"):
            locate(str(tmp_path / "no" / "such" / "thing"))
        with pytest.raises(UsageError, match="says nothing about"):
            locate(str(tmp_path), revision="main")
        with pytest.raises(UsageError, match="cannot be read as a URL"):
            locate("nonsense://x/y")
        with pytest.raises(UsageError, match="fragment #md5=1 is not understood"):
            locate("http://127.0.0.1/m.gguf#md5=1")

    def test_a_folder_named_like_a_hub_id_is_the_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "org" / "m").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        assert locate("org/m").local == Path("org/m")


def test_a_source_shorter_than_it_says(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not the file that was expected") as caught:
        receive(tmp_path / "x", 100, lambda start, end: b"" if start else b"0123456789")
    assert caught.value.why == "the source ends at 10 of 100 bytes"


def test_more_than_the_disk_holds(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLacking, match="has too little space") as caught:
        receive(tmp_path / "x", 1 << 60, lambda start, end: b"x")
    assert caught.value.code == "disk-full"
