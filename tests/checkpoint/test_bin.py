"""pytorch_model.bin is read weights-only; a pickle that wants code is refused by what it wants."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path

import pytest
import torch

from delivery.checkpoint import Checkpoint
from delivery.checkpoint.bin_source import BinSource, load_weights_only
from delivery.checkpoint.convert import convert, open_source
from delivery.errors import DataError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 8,
    "tie_word_embeddings": False,
}


class Runs:
    """Unpickling it would run a command."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch /tmp/deliver-should-not-exist",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "LICENSE").write_text("mine")
    return path


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(8, 8, dtype=torch.bfloat16),
        "model.norm.weight": torch.randn(8, dtype=torch.bfloat16),
        "lm_head.weight": torch.randn(8, 8, dtype=torch.bfloat16),
    }


def converted(folder: Path, **options: object) -> Checkpoint:
    convert(open_source(folder, **options), folder.parent / "out", 10**9, lambda done: None)
    return Checkpoint.open(folder.parent / "out")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_single_file(zipped: bool, folder: Path) -> None:
    torch.save(weights(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    checkpoint = converted(folder)
    for name, tensor in weights().items():
        assert torch.equal(checkpoint.tensor(name), tensor)
    assert (checkpoint.path / "LICENSE").read_text() == "mine"
    assert not list(checkpoint.path.glob("*.bin*"))


def shards(folder: Path) -> dict[str, str]:
    names = list(weights())
    homes = {n: f"pytorch_model-0000{1 + (n == names[2])}-of-00002.bin" for n in names}
    for shard in set(homes.values()):
        torch.save({n: t for n, t in weights().items() if homes[n] == shard}, folder / shard)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": homes}))
    return homes


def test_shards(folder: Path) -> None:
    shards(folder)
    checkpoint = converted(folder)
    assert set(checkpoint.names()) == set(weights())
    assert not (checkpoint.path / "pytorch_model.bin.index.json").exists()


def test_missing_shard_and_wrong_index(folder: Path) -> None:
    homes = shards(folder)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {**homes, "extra": homes["lm_head.weight"]}}))
    with pytest.raises(DataError, match=r"index\.json and pytorch_model-00002-of-00002\.bin disagree"):
        converted(folder)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(DataError, match=r"pytorch_model-00002-of-00002\.bin does not exist"):
        converted(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    with pytest.raises(DataError, match="outside its own directory"):
        converted(folder)
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_pickle_that_runs_code_is_refused_by_name(zipped: bool, folder: Path) -> None:
    state = {**weights(), "x": Runs()}
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(DataError, match=r"pytorch_model\.bin is refused: loading it would run") as caught:
        converted(folder)
    assert caught.value.code == "pickle-runs-code"
    assert f"its pickle wants {os.system.__module__}.system" in caught.value.why
    assert not Path("/tmp/deliver-should-not-exist").exists()
    assert not (folder.parent / "out").exists()


def test_a_bare_pickle_that_runs_code(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(DataError, match=r"pytorch_model\.bin"):
        converted(folder)
    assert not Path("/tmp/deliver-should-not-exist").exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"PK\x03\x04 and nothing more"])
def test_damaged_files(content: bytes, folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"pytorch_model\.bin cannot be read as torch weights") as caught:
        converted(folder)
    assert caught.value.code == "pickle-damaged"


def test_truncated_file(folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    torch.save(weights(), path)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(DataError, match=r"pytorch_model\.bin cannot be read"):
        converted(folder)


def test_what_is_no_dictionary_of_tensors(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "a.bin")
    with pytest.raises(DataError, match="cannot be read") as caught:
        load_weights_only(tmp_path / "a.bin")
    assert "expected a dictionary of tensors, got list" in caught.value.why
    torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "b.bin")
    assert set(load_weights_only(tmp_path / "b.bin")) == {"w"}


def test_no_weights(folder: Path) -> None:
    with pytest.raises(DataError, match="has no weights"):
        BinSource(folder, CONFIG)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_flipped_bytes_are_damage_or_go_unnoticed(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    torch.save({"w": torch.ones(20, 30)}, path, _use_new_zipfile_serialization=zipped)
    whole, draw, refused = path.read_bytes(), random.Random(3), 0
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[draw.randrange(min(len(damaged), 600))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            load_weights_only(path)
        except DataError as error:
            refused += error.code in ("pickle-damaged", "pickle-runs-code")
    assert refused > 20
