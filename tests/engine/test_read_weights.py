"""Weights read in pieces by several threads: byte for byte what a mapping of the file shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from delivery.checkpoint import Checkpoint
from delivery.engine.packed_files import tensor_names
from delivery.engine.read_weights import Stage, read_to
from delivery.errors import DataError

CPU = torch.device("cpu")


def small_stage() -> Stage:
    """Pieces that most tensors need several of."""
    return Stage(1000, pinned=False)


def test_every_byte_arrives(tiny_checkpoint: Path) -> None:
    files = Checkpoint.open(tiny_checkpoint)
    names = [*files.names(), files.names()[0]]
    read = read_to(files, names, CPU, small_stage)
    assert list(read) == list(files.names())
    for name, tensor in read.items():
        assert torch.equal(tensor, files.tensor(name))
        assert tensor.dtype == files.tensor(name).dtype


def test_a_file_that_ends_too_early_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for file in tiny_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    files = Checkpoint.open(tmp_path)
    shard = next(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-3000])
    with pytest.raises(DataError, match=rf"{shard.name} ends within tensor"):
        read_to(files, files.names(), CPU, small_stage)


def test_names_of_tensors_in_a_layout() -> None:
    layout = {"fields": [{"tensor": "b"}, {"tuple": [{"tensor": "a"}, 3, "tensor", None]}, {"tensor": "b"}]}
    assert list(tensor_names(json.loads(json.dumps(layout)))) == ["b", "a", "b"]
