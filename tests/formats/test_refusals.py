"""What a format cannot hold is refused with a sentence; a damaged tensor is refused by its name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from qtensor_samples import eight_bit, integers

from delivery.errors import DataError, UsageError
from delivery.formats import awq, check_export, compressed_tensors, fp8, gptq, load_format, smooth_quant
from delivery.qtensor import QTensor


def plain4(**changes: object) -> QTensor:
    return replace(integers(16, 32, 16, 4, symmetric=False, seed=1), **changes)


@pytest.mark.parametrize(
    ("module", "q", "reason"),
    [
        (awq, integers(16, 32, 16, 8, symmetric=True, seed=1), "weights have 8 bits; this format holds 4"),
        (awq, integers(12, 32, 16, 4, symmetric=True, seed=1), "12 output features are not a multiple of 8"),
        (awq, integers(16, 32, 16, 4, symmetric=True, seed=1, shuffled=True), "reordered"),
        (awq, eight_bit(16, 32, torch.int8, "channel", 1), "activations are quantised to int8"),
        (awq, plain4(scale=torch.full((16, 2), 1e6)), "does not fit float16"),
        (awq, plain4(scale=torch.full((16, 2), 1e-9)), "becomes zero in float16"),
        (gptq, integers(16, 36, 18, 4, symmetric=True, seed=1), "not a multiple of 8"),
        (gptq, plain4(bits=3), "3 bits"),
        (gptq, plain4(group_size=24), "32 input features are not a multiple of the group size 24"),
        (compressed_tensors, eight_bit(16, 32, torch.float8_e5m2, "channel", 1), "float8_e5m2"),
        (compressed_tensors, integers(16, 32, 16, 4, symmetric=True, seed=1, shuffled=True), "reordered"),
        (compressed_tensors, plain4(bits=3), "3 bits"),
        (compressed_tensors, replace(plain4(), act_dtype=torch.int8), "symmetric 8-bit weights"),
        (smooth_quant, plain4(), "weights are uint8 of 4 bits"),
        (smooth_quant, eight_bit(16, 32, torch.float8_e4m3fn, "tensor", 1), "static"),
        (smooth_quant, eight_bit(16, 32, torch.float8_e4m3fn, "block", 1), "one per output channel"),
        (
            smooth_quant,
            eight_bit(16, 32, torch.int8, "channel", 1, acts=False),
            "not quantised to the weights",
        ),
        (fp8, eight_bit(16, 32, torch.int8, "channel", 1), "weights are int8"),
        (fp8, eight_bit(16, 32, torch.float8_e4m3fn, "channel", 1), "128 x 128 blocks"),
        (fp8, eight_bit(16, 576, torch.float8_e4m3fn, "block", 1), "576 input features are not a multiple"),
        (
            compressed_tensors,
            eight_bit(16, 576, torch.float8_e4m3fn, "block", 1),
            "576 input features are not a multiple of the block size 128",
        ),
    ],
)
def test_why_not(module: object, q: QTensor, reason: str) -> None:
    assert reason in module.why_not(q)


def test_awq_and_gptq_know_one_group_size() -> None:
    layers = {
        "m.a": integers(16, 64, 16, 4, symmetric=False, seed=1),
        "m.b": integers(16, 64, 32, 4, symmetric=False, seed=1),
    }
    for name in ("awq", "gptq"):
        with pytest.raises(UsageError, match=rf"{name} cannot represent") as caught:
            check_export(name, layers)
        assert "one group size for all layers: m.a has 16, m.b has 32" in caught.value.why
    check_export("compressed-tensors", layers)
    groups = compressed_tensors.quantization_config(layers)["config_groups"]
    assert [g["targets"] for g in groups.values()] == [["m.a"], ["m.b"]]
    assert [g["weights"]["group_size"] for g in groups.values()] == [16, 32]


def test_awq_refuses_a_plain_layer_whose_name_excludes_another() -> None:
    layers = {"mlp.gate": None, "mlp.gate_proj": integers(16, 32, 16, 4, symmetric=False, seed=1)}
    assert "would exclude mlp.gate_proj too" in awq.why_not_all(layers)


def test_gptq_refuses_a_mix_of_symmetric_and_not() -> None:
    layers = {
        "a": integers(16, 32, 16, 4, symmetric=True, seed=1),
        "b": integers(16, 32, 16, 4, symmetric=False, seed=1),
    }
    assert "one kind for all layers" in gptq.why_not_all(layers)


def test_gptq_excludes_plain_layers_by_rule() -> None:
    layers = {"model.layers.0.a": None, "model.layers.0.b": integers(16, 32, 16, 4, symmetric=True, seed=1)}
    assert gptq.quantization_config(layers)["dynamic"] == {r"-:^model\.layers\.0\.a$": {}}


@pytest.mark.parametrize("name", ["awq", "gptq", "smooth_quant", "fp8"])
def test_only_compressed_tensors_holds_kv_scales(name: str) -> None:
    assert "cannot store the scales of a KV cache" in load_format(name).why_not_all({}, "fp8")


def test_kv_schemes() -> None:
    assert compressed_tensors.quantization_config({}, "fp8")["kv_cache_scheme"]["type"] == "float"
    assert compressed_tensors.quantization_config({}, "int8")["kv_cache_scheme"]["type"] == "int"
    assert "a KV cache in int4" in compressed_tensors.why_not_all({}, "int4")


def damage(module: object, q: QTensor, changes: dict) -> DataError:
    tensors = module.pack("m.q", q)
    for name, change in changes.items():
        if change is None:
            del tensors[f"m.q.{name}"]
        else:
            tensors[f"m.q.{name}"] = change(tensors[f"m.q.{name}"])
    with pytest.raises(DataError, match=r"m\.q\.") as caught:
        module.unpack(
            "m.q", tensors.__getitem__, tensors.__contains__, module.quantization_config({"m.q": q})
        )
    return caught.value


def first_nan(scale: torch.Tensor) -> torch.Tensor:
    return scale.index_fill(0, torch.tensor([0]), float("nan"))


ACT_ORDER = integers(16, 32, 16, 4, symmetric=True, seed=1, shuffled=True)


@pytest.mark.parametrize(
    ("module", "q", "changes", "name", "why"),
    [
        (awq, plain4(), {"qzeros": None}, "qzeros", "other quantised tensors are there"),
        (awq, plain4(), {"scales": first_nan}, "scales", "16 of 32 scales are not finite"),
        (awq, plain4(), {"scales": torch.zeros_like}, "scales", "32 of 32 scales are zero"),
        (awq, plain4(), {"qweight": lambda t: t.long()}, "qweight", "got int64"),
        (awq, plain4(), {"qweight": lambda t: t[:31]}, "scales", "cannot be split into 2 groups"),
        (awq, plain4(), {"qzeros": lambda t: t[:1]}, "qzeros", "expected the shape (2, 2)"),
        (
            gptq,
            ACT_ORDER,
            {"g_idx": lambda t: t.long()},
            "g_idx",
            "expected 1 dimensions of int32, got int64",
        ),
        (gptq, ACT_ORDER, {"g_idx": lambda t: t + 1}, "g_idx", "groups 1 to 2, there are 0 to 1"),
        (gptq, ACT_ORDER, {"g_idx": lambda t: t - 1}, "g_idx", "groups -1 to 0"),
        (gptq, ACT_ORDER, {"g_idx": None, "scales": lambda t: t[:0]}, "scales", "it is empty"),
        (gptq, ACT_ORDER, {"qzeros": lambda t: t[:, :1]}, "qzeros", "expected the shape (2, 2)"),
        (compressed_tensors, plain4(), {"weight_shape": None}, "weight_shape", "other quantised"),
        (compressed_tensors, plain4(), {"weight_shape": lambda t: t * 2}, "weight_shape", "says 32 x 64"),
        (compressed_tensors, plain4(), {"weight_packed": lambda t: t[:, :2]}, "weight_packed", "(16, 4)"),
        (compressed_tensors, plain4(), {"weight_zero_point": lambda t: t[:1]}, "weight_zero_point", "(2, 2)"),
        (
            smooth_quant,
            eight_bit(16, 32, torch.int8, "channel", 1),
            {"scale": lambda t: t[:4]},
            "scale",
            "expected the shape (16, 1), got (4, 1)",
        ),
        (
            fp8,
            eight_bit(200, 32, torch.float8_e4m3fn, "block", 1),
            {"weight_scale_inv": lambda t: t[:1]},
            "weight_scale_inv",
            "expected the shape (2, 1)",
        ),
    ],
)
def test_damaged_tensors_are_named(module: object, q: QTensor, changes: dict, name: str, why: str) -> None:
    error = damage(module, q, changes)
    assert f"'m.q.{name}'" in error.what
    assert why in error.why


@pytest.mark.parametrize(
    ("method", "config", "why"),
    [
        ("awq", {"version": "gemv", "bits": 4}, "version is 'gemv'"),
        ("awq", {"version": "gemm", "bits": 3}, "bits is 3"),
        ("gptq", {"bits": 3}, "bits is 3"),
        ("gptq", {"bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ("fp8", {"weight_block_size": [1, 32]}, "weight_block_size is [1, 32]"),
        ("compressed-tensors", {"config_groups": {}}, "no group of config_groups names m"),
    ],
)
def test_variants_that_cannot_be_read_are_refused(method: str, config: dict, why: str) -> None:
    module = load_format(method)
    with pytest.raises(DataError, match="cannot be read") as caught:
        module.unpack("m", {}.__getitem__, {}.__contains__, {"quant_method": method, **config})
    assert why in caught.value.why


def test_unknown_formats_get_a_suggestion() -> None:
    with pytest.raises(UsageError, match="there is no format 'awk'") as caught:
        load_format("awk")
    assert caught.value.hint == "did you mean 'awq'?"
