"""transformers with the compressed-tensors package loads what we write, and has the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from qtensor_samples import eight_bit

from delivery.checkpoint import Checkpoint, CheckpointWriter
from delivery.formats import compressed_tensors
from delivery.qtensor import QTensor

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny seeded Llama in bfloat16: grouped queries, untied head, biases on attention."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        attention_bias=True,
        max_position_embeddings=128,
        torch_dtype="bfloat16",
    )
    path = tmp_path_factory.mktemp("source")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def rounded(weight: torch.Tensor, bits: int, group_size: int, *, symmetric: bool) -> QTensor:
    """Round to nearest, in the test's own words; scales in the weight's dtype."""
    rows, columns = weight.shape
    size = columns if group_size == -1 else group_size
    groups = weight.float().reshape(rows, -1, size)
    high = (1 << bits) - 1
    if symmetric:
        scale = (groups.abs().amax(-1) / (high / 2)).to(weight.dtype)
        values = (groups / scale.float()[..., None]).round().clamp(-(high + 1) // 2, high // 2)
        return QTensor(values.to(torch.int8).reshape(weight.shape), scale, None, group_size, bits)
    low = groups.amin(-1).clamp_max(0)
    scale = ((groups.amax(-1).clamp_min(0) - low) / high).to(weight.dtype)
    zero = (-low / scale.float()).round().clamp(0, high)
    values = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, high)
    return QTensor(
        values.to(torch.uint8).reshape(weight.shape), scale, zero.to(torch.uint8), group_size, bits
    )


def eight(weight: torch.Tensor, dtype: torch.dtype, granularity: str) -> QTensor:
    """An 8-bit QTensor of the weight's magnitude (values are random: only agreement is tested)."""
    q = eight_bit(*weight.shape, dtype, granularity, seed=int(weight.shape[0]))
    scale = (q.scale * float(weight.abs().amax()) / 200).to(torch.bfloat16).float()
    return QTensor(
        q.qdata, scale, None, -1, 8, None, q.input_scale, act_dtype=q.act_dtype, block_size=q.block_size
    )


MAKERS = {
    "int4 grouped": lambda w: rounded(w, 4, 32, symmetric=True),
    "int4 grouped with zero points": lambda w: rounded(w, 4, 32, symmetric=False),
    "int4 per channel": lambda w: rounded(w, 4, -1, symmetric=True),
    "int8 weights only": lambda w: rounded(w, 8, 32, symmetric=True),
    "int8": lambda w: eight(w, torch.int8, "channel"),
    "fp8 per channel": lambda w: eight(w, torch.float8_e4m3fn, "channel"),
    "fp8 per tensor": lambda w: eight(w, torch.float8_e4m3fn, "tensor"),
    "fp8 blocks": lambda w: eight(w, torch.float8_e4m3fn, "block"),
    "mixed": lambda w: (
        eight(w, torch.int8, "channel") if w.shape[0] == 256 else rounded(w, 4, 32, symmetric=True)
    ),
}


def export(source: Path, out: Path, make: Any, kv: str | None = None) -> dict[str, QTensor | None]:
    """Quantise every linear layer but layer 1's down_proj and lm_head."""
    checkpoint = Checkpoint.open(source)
    layers: dict[str, QTensor | None] = {}
    with CheckpointWriter(out, shard_bytes=40_000) as writer:
        writer.copy_files(checkpoint)
        for name in checkpoint.names():
            prefix, _, leaf = name.rpartition(".")
            tensor = checkpoint.tensor(name)
            if not prefix.endswith("_proj"):
                if prefix == "lm_head":
                    layers[prefix] = None
                writer.add(name, tensor)
            elif leaf == "weight":
                plain = prefix == "model.layers.1.mlp.down_proj"
                layers[prefix] = None if plain else make(tensor)
                if plain:
                    writer.add(name, tensor)
                    continue
                bias = checkpoint.tensor(f"{prefix}.bias") if checkpoint.has(f"{prefix}.bias") else None
                for stored, value in compressed_tensors.pack(prefix, layers[prefix], bias).items():
                    writer.add(stored, value)
        if kv:
            for layer in range(2):
                scales = compressed_tensors.pack_kv(
                    f"model.layers.{layer}.self_attn", torch.tensor(0.5), torch.tensor(0.25)
                )
                for stored, value in scales.items():
                    writer.add(stored, value)
        entry = compressed_tensors.quantization_config(layers, kv)
        writer.finish({**checkpoint.config, "quantization_config": entry})
    return layers


@pytest.mark.filterwarnings("ignore:You passed .quantization_config.")
@pytest.mark.parametrize("kind", MAKERS)
def test_weights_are_the_same(kind: str, source: Path, tmp_path: Path) -> None:
    layers = export(source, tmp_path / "q", MAKERS[kind])
    # With zero points transformers 5.24 prepares unpacked ones and refuses the file's, unless told to
    # unpack while loading.
    options = {}
    if "zero points" in kind:
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16, **options)
    ids = torch.arange(20)[None] % 96
    with torch.no_grad():
        model(ids)  # the first pass makes compressed-tensors unpack
    modules = dict(model.named_modules())
    ours = Checkpoint.open(tmp_path / "q")
    for prefix, q in layers.items():
        seen = modules[prefix].weight.float()
        expected = ours.weight(prefix)
        assert isinstance(expected, QTensor) == (q is not None)
        dense = expected.dequantize(torch.float32) if q is not None else expected.float()
        # compressed-tensors multiplies in bfloat16: one rounding of the product
        torch.testing.assert_close(seen, dense.to(torch.bfloat16).float(), rtol=2**-7, atol=0)
        if q is not None:
            assert torch.equal(dense, q.dequantize(torch.float32))


def test_plain_tensors_stay_bit_identical(source: Path, tmp_path: Path) -> None:
    layers = export(source, tmp_path / "q", MAKERS["int4 grouped"])
    before, after = Checkpoint.open(source), Checkpoint.open(tmp_path / "q")
    quantised = {f"{prefix}.weight" for prefix, q in layers.items() if q is not None}
    kept = [name for name in before.names() if name not in quantised]
    assert "model.layers.1.mlp.down_proj.weight" in kept
    assert "model.layers.0.self_attn.q_proj.bias" in kept
    for name in kept:
        assert torch.equal(before.tensor(name).view(torch.int16), after.tensor(name).view(torch.int16))
    assert len({after.info(n).shard for n in after.names()}) > 1


def test_kv_scales_do_not_disturb_loading(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "q", MAKERS["fp8 per channel"], kv="fp8")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", dtype=torch.bfloat16, output_loading_info=True
    )
    assert model.config.quantization_config.quantization_config.kv_cache_scheme.num_bits == 8
    assert not report["missing_keys"]
    ours = Checkpoint.open(tmp_path / "q")
    k, v = compressed_tensors.unpack_kv("model.layers.1.self_attn", ours.tensor, ours.has)
    assert (float(k), float(v)) == (0.5, 0.25)
