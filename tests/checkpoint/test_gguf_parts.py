"""GGUF models in several files, and files whose parts contradict each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_samples as samples
import pytest
import torch
from tokenizer_samples import byte_level

from delivery.checkpoint import Checkpoint
from delivery.checkpoint.convert import convert, open_source
from delivery.checkpoint.fetch import locate
from delivery.checkpoint.gguf_source import GgufSource
from delivery.checkpoint.inspect import describe
from delivery.errors import DataError


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A tiny Llama in three files."""
    folder = tmp_path / "split models"
    folder.mkdir()
    model = samples.tiny("Llama")
    samples.write(folder / "m.gguf", model, "llama", tokenizer=byte_level(), tensors_a_file=10)
    found = sorted(folder.glob("*.gguf"))
    assert len(found) == 3
    return found


def test_all_files_of_a_model_are_read(parts: list[Path], tmp_path: Path) -> None:
    model = samples.tiny("Llama")
    for number, given in enumerate((parts[0].parent, parts[0], parts[2])):
        out = tmp_path / f"out{number}"
        convert(open_source(given), out, 10**9, lambda _bytes: None)
        checkpoint = Checkpoint.open(out)
        for name, values in model.state_dict().items():
            assert torch.equal(checkpoint.tensor(name), values), name


def test_facts_are_those_of_all_files(parts: list[Path], tmp_path: Path) -> None:
    whole = samples.write(tmp_path / "m.gguf", samples.tiny("Llama"), "llama", tokenizer=byte_level())
    facts = describe(parts[0])
    assert facts["parameters"] == describe(whole)["parameters"] > 0


def test_a_missing_file_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(DataError, match=r"m-00002-of-00003\.gguf does not exist") as caught:
        open_source(parts[0])
    assert caught.value.code == "shard-missing"


def test_a_part_under_another_name_says_that_it_is_one(parts: list[Path]) -> None:
    alone = parts[0].rename(parts[0].with_name("renamed.gguf"))
    with pytest.raises(DataError, match=r"renamed\.gguf is one of 3 files") as caught:
        open_source(alone)
    assert caught.value.code == "shard-missing"


def test_a_tensor_in_two_files_is_refused(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(DataError, match="occurs in two files"):
        open_source(parts[0])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"llama.attention.head_count": [4, 4]}, r"head_count of the GGUF file is wrong"),
        ({"llama.attention.head_count": 0}, r"head_count of the GGUF file is wrong"),
        ({"llama.block_count": "2"}, r"block_count of the GGUF file is wrong"),
        ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer of the GGUF file cannot be rebuilt"),
        ({"tokenizer.ggml.merges": ["no such"]}, "tokenizer of the GGUF file cannot be rebuilt"),
        ({"tokenizer.ggml.eos_token_id": "end"}, "cannot be rebuilt|eos_token_id"),
    ],
)
def test_metadata_of_the_wrong_kind_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], said: str
) -> None:
    from delivery.checkpoint import gguf_parts

    file = samples.write(tmp_path / "m.gguf", samples.tiny("Llama"), "llama", tokenizer=byte_level())
    opened = gguf_parts.GgufFile(file)
    opened.metadata |= keys
    monkeypatch.setattr(gguf_parts, "GgufFile", lambda _path: opened)
    with pytest.raises(DataError, match=said):
        GgufSource(file).files()


def test_a_change_in_any_file_makes_another_model(parts: list[Path]) -> None:
    model = locate(str(parts[0]))
    before = dict(model.digests())
    assert set(before) == {part.name for part in parts}
    parts[2].write_bytes(parts[2].read_bytes() + b"\0" * 32)
    assert dict(model.digests()) != before
