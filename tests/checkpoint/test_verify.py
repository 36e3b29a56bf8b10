"""An export is read back and held against its source; a quantised checkpoint can become float again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from delivery.checkpoint import Checkpoint, CheckpointWriter
from delivery.checkpoint.convert import convert, open_source
from delivery.checkpoint.verify import verify_export
from delivery.errors import DataError
from delivery.formats import awq, compressed_tensors, fp8, gptq, smooth_quant
from delivery.qtensor import QTensor

UP = "model.layers.0.mlp.up_proj"


def grouped(weight: torch.Tensor) -> QTensor:
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, -1, 32)
    scale = (groups.abs().amax(-1) / 7.5).to(torch.float16)
    values = (groups / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int8)
    return QTensor(values.reshape(rows, columns), scale, None, 32, 4)


def per_channel(weight: torch.Tensor) -> QTensor:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    values = (weight.float() / scale).round().to(torch.int8)
    return QTensor(values, scale, None, -1, 8, act_dtype=torch.int8)


def blocks(weight: torch.Tensor) -> QTensor:
    step = float(weight.float().abs().amax() / 448)
    scale = torch.full((-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)), step)
    values = (weight.float() / step).to(torch.float8_e4m3fn)
    return QTensor(values, scale, None, -1, 8, act_dtype=torch.float8_e4m3fn, block_size=128)


FORMATS = {
    "awq": (awq, grouped),
    "gptq": (gptq, grouped),
    "pack-quantized": (compressed_tensors, grouped),
    "int-quantized": (compressed_tensors, per_channel),
    "smooth_quant": (smooth_quant, per_channel),
    "fp8": (fp8, blocks),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    import tiny_checkpoint

    return Checkpoint.open(tiny_checkpoint.write(tmp_path_factory.mktemp("source"), hidden=128))


def export(
    source: Checkpoint, out: Path, kind: str = "awq", **replaced: torch.Tensor
) -> tuple[QTensor, list[str]]:
    module, make = FORMATS[kind]
    q = make(source.tensor(f"{UP}.weight"))
    unchanged = [n for n in source.names() if n != f"{UP}.weight"]
    tensors = {n: source.tensor(n) for n in unchanged} | module.pack(UP, q)
    with CheckpointWriter(out) as writer:
        writer.copy_files(source)
        for name, tensor in (tensors | replaced).items():
            writer.add(name, tensor)
        entry = module.quantization_config({UP: q})
        writer.finish({**source.config, "quantization_config": entry})
    return q, unchanged


def test_a_good_export(source: Checkpoint, tmp_path: Path) -> None:
    _, unchanged = export(source, tmp_path / "out")
    assert verify_export(tmp_path / "out", source, unchanged) == len(unchanged)


@pytest.mark.parametrize(
    "change", [lambda t: t + 1e-7, lambda t: t.double(), lambda t: t[:-1], lambda t: -t.abs() * 0]
)
def test_a_tensor_that_changed_is_named(change: object, source: Checkpoint, tmp_path: Path) -> None:
    name = "model.norm.weight"
    _, unchanged = export(source, tmp_path / "out", **{name: change(source.tensor(name))})
    with pytest.raises(DataError, match=r"'model\.norm\.weight' differs from the source"):
        verify_export(tmp_path / "out", source, unchanged)


def test_minus_zero_is_another_value(source: Checkpoint, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "a") as writer:
        writer.add("x", torch.zeros(2))
        writer.finish(source.config)
    with CheckpointWriter(tmp_path / "b") as writer:
        writer.add("x", -torch.zeros(2))
        writer.finish(source.config)
    with pytest.raises(DataError, match="'x' differs from the source"):
        verify_export(tmp_path / "b", Checkpoint.open(tmp_path / "a"), ["x"])


def test_scales_that_are_not_finite(source: Checkpoint, tmp_path: Path) -> None:
    bad = awq.pack(UP, grouped(source.tensor(f"{UP}.weight")))[f"{UP}.scales"]
    bad[0, 0] = float("inf")
    _, unchanged = export(source, tmp_path / "out", **{f"{UP}.scales": bad})
    with pytest.raises(DataError, match=rf"{UP}\.scales' holds NaN or infinite"):
        verify_export(tmp_path / "out", source, unchanged)


@pytest.mark.parametrize("kind", FORMATS)
def test_reading_back_to_float(kind: str, source: Checkpoint, tmp_path: Path) -> None:
    q, _ = export(source, tmp_path / "q", kind)
    opened = open_source(tmp_path / "q", dequantize=True)
    convert(opened, tmp_path / "float", 10**9, lambda done: None)
    back = Checkpoint.open(tmp_path / "float")
    assert back.quantization is None
    assert set(back.names()) == set(source.names())
    assert torch.equal(back.tensor(f"{UP}.weight"), q.dequantize(torch.float32))
    assert torch.equal(back.tensor("model.norm.weight"), source.tensor("model.norm.weight"))
    assert opened.peak_bytes > 0


def test_passing_through(source: Checkpoint, tmp_path: Path) -> None:
    q, _ = export(source, tmp_path / "q")
    convert(open_source(tmp_path / "q"), tmp_path / "same", 10**9, lambda done: None)
    weight = Checkpoint.open(tmp_path / "same").weight(UP)
    assert isinstance(weight, QTensor)
    assert torch.equal(weight.dequantize(), q.dequantize())
