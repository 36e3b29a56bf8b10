"""The bundled engine's own format: outliers, mixed groups, and what the other formats say to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qtensor_samples import eight_bit, groupings, integers, seeds

from delivery.errors import DataError
from delivery.formats import awq, compressed_tensors, deliver, format_of, gptq
from delivery.qtensor import Outliers, QTensor


def with_outliers(q: QTensor, seed: int) -> QTensor:
    random = torch.Generator().manual_seed(seed)
    index = torch.randperm(q.qdata.numel(), generator=random)[:5].sort().values
    values = torch.randint(-32, 32, (5,), generator=random).to(torch.int8)
    scale = torch.rand(q.shape[0], generator=random) + 0.1
    return replace(q, outliers=Outliers(index, values, scale.to(torch.float16)))


@settings(max_examples=25, deadline=None)
@given(groupings, st.sampled_from([4, 8]), st.booleans(), st.booleans(), seeds)
def test_everything_comes_back(
    shape: tuple[int, int], bits: int, symmetric: bool, shuffled: bool, seed: int
) -> None:
    columns, size = shape
    shuffled = shuffled and size != -1
    q = integers(24, columns, size, bits, symmetric=symmetric, seed=seed, shuffled=shuffled)
    for one in (q, with_outliers(q, seed)):
        tensors = deliver.pack("m.q", one)
        config = deliver.quantization_config({"m.q": one.to("meta"), "m.plain": None})
        assert format_of(config) is deliver
        assert deliver.is_quantized("m.q", tensors.__contains__, config)
        again = deliver.unpack("m.q", tensors.__getitem__, tensors.__contains__, config)
        assert torch.equal(again.dequantize(), one.dequantize())
        assert again.bits_per_weight() == one.bits_per_weight()
        assert config["ignore"] == ["m.plain", "lm_head"]


@pytest.mark.parametrize("module", [awq, gptq, compressed_tensors])
def test_other_formats_refuse_outliers_with_the_reason(module: object) -> None:
    q = integers(16, 32, 16, 4, symmetric=True, seed=1)
    assert module.why_not(q) is None
    assert "only the engine's own format" in module.why_not(with_outliers(q, 0))


def test_what_it_refuses_itself() -> None:
    q = integers(16, 32, 16, 4, symmetric=True, seed=1)
    assert deliver.why_not(with_outliers(q, 0)) is None
    assert "activations" in (deliver.why_not(eight_bit(16, 32, torch.int8, "channel", 1)) or "")
    assert "ask for it when serving" in (deliver.why_not_all({"m.q": q}, "int4") or "")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("outlier_index", torch.tensor([0, 1, 2, 3, 512]), "leaves the 16 x 32 weights"),
        ("outlier_value", torch.zeros(4, dtype=torch.int8), "outlier_value"),
        ("outlier_scale", torch.ones(3), "outlier_scale"),
        ("weight_g_idx", torch.full((32,), 7, dtype=torch.int32), "leaves the groups 0 to 1"),
    ],
)
def test_damage_is_named(name: str, tensor: torch.Tensor, message: str) -> None:
    q = with_outliers(integers(16, 32, 16, 4, symmetric=False, seed=1), 0)
    tensors = deliver.pack("m.q", q) | {f"m.q.{name}": tensor}
    config = deliver.quantization_config({"m.q": q})
    with pytest.raises(DataError, match=message):
        deliver.unpack("m.q", tensors.__getitem__, tensors.__contains__, config)
