"""A directory's index and its shards are held against each other both ways; damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from delivery.checkpoint import Checkpoint
from delivery.errors import DataError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 8,
}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards with one tensor each, and their index."""
    write_config(tmp_path, CONFIG)
    save_file({"a": torch.ones(4)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(4)}, tmp_path / "model-00002-of-00002.safetensors")
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    return tmp_path


def write_config(path: Path, config: dict) -> None:
    (path / "config.json").write_text(json.dumps(config))


def write_index(path: Path, weight_map: object) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def refused(path: Path) -> DataError:
    with pytest.raises(DataError, match=r"error\[") as caught:
        Checkpoint.open(path)
    return caught.value


def test_opens(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    assert checkpoint.names() == ("a", "b")
    assert checkpoint.info("b").shard == "model-00002-of-00002.safetensors"
    assert checkpoint.size_bytes() == 32
    assert checkpoint.quantization is None


def test_truncated_shard(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    assert (
        refused(sharded)
        .render()
        .startswith(
            "error[shard-truncated]: model-00002-of-00002.safetensors is truncated\n  why:  its header needs"
        )
    )


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    error = refused(sharded)
    assert error.code == "shard-missing"
    assert error.what == "model-00002-of-00002.safetensors does not exist"
    assert "says that it holds 1 tensors" in error.why


def test_tensor_in_two_shards(sharded: Path) -> None:
    save_file({"a": torch.ones(4), "b": torch.ones(4)}, sharded / "model-00002-of-00002.safetensors")
    error = refused(sharded)
    assert error.code == "tensor-twice"
    assert "'a'" in error.what
    assert "model-00001-of-00002.safetensors and model-00002-of-00002.safetensors" in error.why


def test_tensor_that_the_index_does_not_name(sharded: Path) -> None:
    save_file({"b": torch.ones(4), "c": torch.ones(4)}, sharded / "model-00002-of-00002.safetensors")
    error = refused(sharded)
    assert error.code == "index-disagrees"
    assert "tensor 'c' is in model-00002-of-00002.safetensors, the index has it nowhere" in error.why


def test_tensor_that_no_shard_holds(sharded: Path) -> None:
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    write_index(sharded, {"a": shards[0], "b": shards[1], "c": shards[1]})
    error = refused(sharded)
    assert error.code == "index-disagrees"
    assert "the index has tensor 'c'" in error.why


def test_tensor_in_another_shard_than_the_index_says(sharded: Path) -> None:
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    write_index(sharded, {"a": shards[1], "b": shards[0]})
    assert refused(sharded).code == "index-disagrees"


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_index_without_a_map(weight_map: object, sharded: Path) -> None:
    write_index(sharded, weight_map)
    assert refused(sharded).what == "model.safetensors.index.json has no usable weight_map"


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/x.safetensors", "a/../../x", "", "a\\b"])
def test_index_that_leaves_the_directory(shard: str, sharded: Path) -> None:
    write_index(sharded, {"a": shard})
    assert refused(sharded).code == "path-escapes"


def test_index_that_is_no_json(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text('{"weight_map"')
    assert refused(sharded).code == "json-damaged"


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert refused(sharded).code == "index-missing"


def test_no_weights(tmp_path: Path) -> None:
    """The hint is convert where it would help, which it would not after convert itself found nothing."""
    write_config(tmp_path, CONFIG)
    error = refused(tmp_path)
    assert (error.code, error.what) == ("weights-missing", f"{tmp_path} has no weights")
    assert "convert" not in error.hint
    (tmp_path / "pytorch_model.bin").touch()
    error = refused(tmp_path)
    assert (error.code, error.why) == ("weights-missing", "found pytorch_model.bin")
    assert error.hint == f"deliver convert --model {tmp_path} --out DIR"


def test_no_directory_and_no_config(tmp_path: Path) -> None:
    assert refused(tmp_path / "nothing").code == "checkpoint-missing"
    assert refused(tmp_path).code == "config-missing"


@pytest.mark.parametrize("stated", [None, [], "LlamaForCausalLM", [3]])
def test_config_without_architectures(stated: object, sharded: Path) -> None:
    write_config(sharded, {**CONFIG, "architectures": stated})
    assert refused(sharded).code == "no-architecture"


def test_unknown_architecture_is_found_before_the_weights(sharded: Path) -> None:
    write_config(sharded, {**CONFIG, "architectures": ["NoSuchModel"]})
    (sharded / "model-00002-of-00002.safetensors").unlink()
    error = refused(sharded)
    assert error.code == "unknown-architecture"
    assert "NoSuchModel" in error.what
    assert "LlamaForCausalLM" in error.why


def test_links_of_a_hub_cache_are_followed(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    snapshot = tmp_path_factory.mktemp("snapshot")
    for path in sharded.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert Checkpoint.open(snapshot).names() == ("a", "b")


def test_unknown_tensor_gets_a_suggestion(sharded: Path) -> None:
    with pytest.raises(DataError, match="has no tensor 'aa'") as caught:
        Checkpoint.open(sharded).tensor("aa")
    assert caught.value.hint == "did you mean 'a'?"


def test_shards_may_lie_in_a_folder(sharded: Path) -> None:
    whole = {name: Checkpoint.open(sharded).tensor(name).clone() for name in ("a", "b")}
    (sharded / "weights").mkdir()
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for shard in shards:
        (sharded / shard).rename(sharded / "weights" / shard)
    write_index(sharded, {"a": f"weights/{shards[0]}", "b": f"weights/{shards[1]}"})
    for name, values in whole.items():
        assert torch.equal(Checkpoint.open(sharded).tensor(name), values)


def test_a_folder_of_links_is_read_as_the_files(sharded: Path, tmp_path: Path) -> None:
    """As in the Hugging Face cache: names link to files that are named by their hash."""
    blobs, snapshot = tmp_path / "models--org--naïve 模型" / "blobs", tmp_path / "snapshot"
    blobs.mkdir(parents=True)
    snapshot.mkdir()
    for number, file in enumerate([p for p in sharded.iterdir() if p.is_file()]):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(blobs / f"{number:040x}")
    assert Checkpoint.open(snapshot).names() == ("a", "b")
    assert float(Checkpoint.open(snapshot).tensor("b").sum()) > 0
