"""Every format gives back exactly what was packed, and an independent reader sees the same weights."""

from __future__ import annotations

import format_readers as reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qtensor_samples import eight_bit, groupings, integers, seeds

from delivery.errors import DataError
from delivery.formats import (
    awq,
    compressed_tensors,
    format_names,
    format_of,
    fp8,
    gptq,
    load_format,
    smooth_quant,
)
from delivery.qtensor import QTensor

QUICK = settings(max_examples=25, deadline=None)


def reread(
    module: object, q: QTensor, config: dict, bias: torch.Tensor | None = None
) -> tuple[QTensor, dict]:
    tensors = module.pack("m.q", q, bias)
    assert module.is_quantized("m.q", tensors.__contains__, config)
    return module.unpack("m.q", tensors.__getitem__, tensors.__contains__, config), tensors


def assert_equal(a: QTensor, b: QTensor) -> None:
    assert torch.equal(a.qdata.float(), b.qdata.float())
    assert a.qdata.dtype == b.qdata.dtype
    assert torch.equal(a.scale, b.scale)
    assert (a.zero_point is None) == (b.zero_point is None)
    assert a.zero_point is None or torch.equal(a.zero_point, b.zero_point)
    assert (a.bits, a.group_size, a.block_size, a.act_dtype) == (
        b.bits,
        b.group_size,
        b.block_size,
        b.act_dtype,
    )
    assert torch.equal(a.group_index(), b.group_index())


def grouped(q: QTensor) -> int:
    """The group size as a reader finds it: one group over everything reads as −1."""
    return -1 if q.scale.shape[1] == 1 else q.group_size


@QUICK
@given(groupings, st.sampled_from([8, 16, 48]), st.booleans(), seeds)
def test_awq(shape: tuple[int, int], rows: int, symmetric: bool, seed: int) -> None:
    q = integers(rows, shape[0], shape[1], 4, symmetric=symmetric, seed=seed)
    assert awq.why_not(q) is None
    back, tensors = reread(awq, q, awq.quantization_config({"m.q": q}))
    assert torch.equal(back.dequantize(torch.float64), q.dequantize(torch.float64))
    assert back.group_size == grouped(q)
    assert tensors["m.q.qweight"].shape == (shape[0], rows // 8)
    np.testing.assert_array_equal(reference.awq(tensors, "m.q"), q.dequantize(torch.float64).numpy())


def test_awq_writes_symmetric_weights_with_zero_point_8() -> None:
    q = integers(8, 16, 8, 4, symmetric=True, seed=1)
    zeros = awq.pack("m", q)["m.qzeros"]
    assert set((zeros.numpy().view(np.uint32)).ravel().tolist()) == {0x88888888}


@QUICK
@given(
    groupings,
    st.sampled_from([2, 4, 8]),
    st.sampled_from([16, 48]),
    st.booleans(),
    st.booleans(),
    seeds,
)
def test_gptq(
    shape: tuple[int, int], bits: int, rows: int, symmetric: bool, shuffled: bool, seed: int
) -> None:
    columns, size = shape[0] * 2, shape[1]
    q = integers(rows, columns, size, bits, symmetric=symmetric, seed=seed, shuffled=shuffled and size != -1)
    assert gptq.why_not(q) is None
    config = gptq.quantization_config({"m.q": q})
    assert config["checkpoint_format"] == ("gptq" if symmetric else "gptq_v2")
    back, tensors = reread(gptq, q, config)
    expected = q.dequantize(torch.float64)
    assert torch.equal(back.dequantize(torch.float64), expected)
    assert back.group_size == grouped(q)
    np.testing.assert_array_equal(reference.gptq(tensors, "m.q", bits, symmetric), expected.numpy())


def test_gptq_version_1_stores_zero_points_less_one() -> None:
    symmetric = gptq.pack("m", integers(8, 16, 8, 4, symmetric=True, seed=1))
    assert set(symmetric["m.qzeros"].ravel().tolist()) == {0x77777777}
    q = integers(8, 16, 8, 4, symmetric=False, seed=2)
    first, second = gptq.pack("m", q, version="gptq"), gptq.pack("m", q, version="gptq_v2")
    for tensors, version in ((first, "gptq"), (second, "gptq_v2")):
        config = {"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": version}
        back = gptq.unpack("m", tensors.__getitem__, tensors.__contains__, config)
        assert torch.equal(back.dequantize(), q.dequantize())
    assert not torch.equal(first["m.qzeros"], second["m.qzeros"])


@QUICK
@given(groupings, st.sampled_from([4, 8]), st.integers(1, 19), st.booleans(), seeds)
def test_pack_quantized(shape: tuple[int, int], bits: int, rows: int, symmetric: bool, seed: int) -> None:
    q = integers(rows, shape[0], shape[1], bits, symmetric=symmetric, seed=seed, scale_dtype=torch.bfloat16)
    config = compressed_tensors.quantization_config({"m.q": q})
    assert config["format"] == "pack-quantized"
    back, tensors = reread(compressed_tensors, q, config)
    assert torch.equal(back.dequantize(torch.float64), q.dequantize(torch.float64))
    assert torch.equal(back.qdata, q.qdata)
    assert torch.equal(back.scale, q.scale)
    np.testing.assert_array_equal(reference.packed(tensors, "m.q", bits), q.dequantize(torch.float64).numpy())


@pytest.mark.parametrize("columns", [5, 9, 31])
def test_pack_quantized_pads_rows_that_fill_no_word(columns: int) -> None:
    q = integers(3, columns, -1, 4, symmetric=True, seed=3)
    back, tensors = reread(compressed_tensors, q, compressed_tensors.quantization_config({"m.q": q}))
    assert_equal(back, q)
    assert tensors["m.q.weight_packed"].shape == (3, -(-columns // 8))


@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
def test_float_quantized(granularity: str) -> None:
    q = eight_bit(160, 200, torch.float8_e4m3fn, granularity, seed=4)
    config = compressed_tensors.quantization_config({"m.q": q})
    assert config["format"] == "float-quantized"
    back, tensors = reread(compressed_tensors, q, config, torch.ones(160))
    assert_equal(back, q)
    assert (back.input_scale is None) == (granularity != "tensor")
    assert torch.equal(tensors["m.q.bias"], torch.ones(160))
    block = 128 if granularity == "block" else 0
    np.testing.assert_allclose(
        reference.scaled(tensors, "m.q.weight", "m.q.weight_scale", block),
        q.dequantize(torch.float64).numpy(),
        rtol=1e-12,
    )


@pytest.mark.parametrize("acts", [True, False])
def test_weights_only_fp8_says_so(acts: bool) -> None:
    q = eight_bit(16, 32, torch.float8_e4m3fn, "channel", seed=4, acts=acts)
    back, _ = reread(compressed_tensors, q, compressed_tensors.quantization_config({"m.q": q}))
    assert back.act_dtype == q.act_dtype


def test_int_quantized() -> None:
    q = eight_bit(24, 40, torch.int8, "channel", seed=5)
    config = compressed_tensors.quantization_config({"m.q": q})
    assert config["format"] == "int-quantized"
    back, tensors = reread(compressed_tensors, q, config)
    assert_equal(back, q)
    assert {n.split(".")[-1] for n in tensors} == {"weight", "weight_scale"}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_smooth_quant(dtype: torch.dtype) -> None:
    q = eight_bit(24, 40, dtype, "channel", seed=6)
    config = smooth_quant.quantization_config({"m.q": q})
    assert config["quant_dtype"] == str(dtype).removeprefix("torch.")
    back, tensors = reread(smooth_quant, q, config)
    assert_equal(back, q)
    assert tensors["m.q.scale"].dtype == torch.float32
    np.testing.assert_allclose(
        reference.scaled(tensors, "m.q.weight", "m.q.scale"), q.dequantize(torch.float64).numpy(), rtol=1e-12
    )


def test_fp8_blocks() -> None:
    q = eight_bit(300, 130, torch.float8_e4m3fn, "block", seed=7)
    back, tensors = reread(fp8, q, fp8.quantization_config({"m.q": q}))
    assert_equal(back, q)
    assert tensors["m.q.weight_scale_inv"].shape == (3, 2)


def test_kv_scales_travel_and_are_never_unset() -> None:
    tensors = compressed_tensors.pack_kv("m.self_attn", torch.tensor(0.5), torch.tensor([0.25]))
    k, v = compressed_tensors.unpack_kv("m.self_attn", tensors.__getitem__, tensors.__contains__)
    assert (float(k), float(v)) == (0.5, 0.25)
    assert compressed_tensors.unpack_kv("other", tensors.__getitem__, tensors.__contains__) is None
    with pytest.raises(DataError, match=r"k_scale.*not what its format says"):
        compressed_tensors.pack_kv("m.self_attn", torch.tensor(float("nan")), torch.tensor(1.0))


def test_layers_on_the_meta_device_give_the_same_config() -> None:
    layers = {"a": integers(16, 32, 16, 4, symmetric=False, seed=1), "b": None}
    ghosts = {n: q and q.to("meta") for n, q in layers.items()}
    for module in (awq, gptq, compressed_tensors):
        assert module.quantization_config(ghosts) == module.quantization_config(layers)
        assert module.why_not_all(ghosts) is None


def test_formats_are_found_by_name_and_by_method() -> None:
    assert {"awq", "compressed-tensors", "fp8", "gptq", "smooth_quant"} <= set(format_names())
    for name in format_names():
        module = load_format(name)
        assert format_of({"quant_method": name}) is module
    with pytest.raises(DataError, match="'bitsandbytes' cannot be read"):
        format_of({"quant_method": "bitsandbytes"})
