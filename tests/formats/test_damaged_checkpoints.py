"""Damaged quantised checkpoints are refused by the name of what is wrong, not read as something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from qtensor_samples import eight_bit, integers

from delivery.checkpoint import Checkpoint, CheckpointWriter
from delivery.errors import DataError
from delivery.formats import load_format
from delivery.qtensor import QTensor

SAMPLES = {
    "awq": integers(32, 64, 32, 4, symmetric=False, seed=0),
    "gptq": integers(32, 64, 32, 4, symmetric=False, seed=0),
    "compressed-tensors": eight_bit(32, 64, torch.float8_e4m3fn, "tensor", 0),
    "smooth_quant": eight_bit(32, 64, torch.int8, "channel", 0),
    "fp8": eight_bit(256, 256, torch.float8_e4m3fn, "block", 0),
    "deliver": integers(32, 64, 32, 4, symmetric=False, seed=0),
}
SCALES = {"compressed-tensors": "weight_scale", "smooth_quant": "scale", "fp8": "weight_scale_inv"}


def written(folder: Path, name: str, without: str = "", config: dict[str, Any] | None = None) -> Checkpoint:
    """A checkpoint of one layer `l`; config: changes of its quantization_config."""
    form = load_format(name)
    q = SAMPLES[name]
    with CheckpointWriter(folder) as writer:
        for tensor, values in form.pack("l", q).items():
            if tensor != f"l.{without}":
                writer.add(tensor, values)
        settings = {**form.quantization_config({"l": q}), **(config or {})}
        writer.finish({"architectures": ["LlamaForCausalLM"], "quantization_config": settings})
    return Checkpoint.open(folder)


@pytest.mark.parametrize("name", SAMPLES)
def test_what_was_written_is_read(tmp_path: Path, name: str) -> None:
    read = written(tmp_path / "c", name).weight("l")
    assert isinstance(read, QTensor)
    assert torch.equal(read.dequantize(torch.float32), SAMPLES[name].dequantize(torch.float32))


@pytest.mark.parametrize("name", SCALES)
def test_a_weight_without_its_scales_is_no_plain_weight(tmp_path: Path, name: str) -> None:
    checkpoint = written(tmp_path / "c", name, without=SCALES[name])
    with pytest.raises(DataError, match=r"scales of l\.weight are missing") as caught:
        checkpoint.weight("l")
    assert caught.value.code == "quantised-tensor-missing"


def test_fp8_with_a_scale_per_tensor_is_called_another_variant(tmp_path: Path) -> None:
    """As AutoFP8 writes it: `quant_method: fp8` too, and nothing of it is missing."""
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.add("l.weight", torch.ones(32, 64).to(torch.float8_e4m3fn))
        writer.add("l.weight_scale", torch.ones(1))
        settings = {"quant_method": "fp8", "activation_scheme": "static"}
        writer.finish({"architectures": ["LlamaForCausalLM"], "quantization_config": settings})
    with pytest.raises(DataError, match="this variant of fp8 cannot be read") as caught:
        Checkpoint.open(tmp_path / "c").weight("l")
    assert caught.value.code == "quantization-variant"


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gptq", {"group_size": None}),
        ("fp8", {"weight_block_size": 128}),
        ("compressed-tensors", {"config_groups": ["group_0"]}),
        ("compressed-tensors", {"config_groups": {"group_0": {"targets": 3, "weights": {}}}}),
        ("deliver", {"layers": "l"}),
        ("deliver", {"layers": {"l": {"bits": 4, "group_size": 0, "columns": 64}}}),
    ],
)
def test_a_config_of_the_wrong_kind_is_named(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    checkpoint = written(tmp_path / "c", name, config=json.loads(json.dumps(config)))
    with pytest.raises(DataError, match="quantization_config of") as caught:
        checkpoint.weight("l")
    assert caught.value.code == "quantization-variant"


@pytest.mark.parametrize("tensor", ["qweight", "qzeros", "scales"])
def test_an_empty_tensor_is_named(tmp_path: Path, tensor: str) -> None:
    def get(name: str, device: object = "cpu") -> torch.Tensor:
        found: torch.Tensor = packed[name]
        return found[:0] if name == f"l.{tensor}" else found

    packed = load_format("awq").pack("l", SAMPLES["awq"])
    config = load_format("awq").quantization_config({"l": SAMPLES["awq"]})
    with pytest.raises(DataError, match=rf"'l\.{tensor}' is not what") as caught:
        load_format("awq").unpack("l", get, packed.__contains__, config)
    assert "it is empty" in caught.value.why
