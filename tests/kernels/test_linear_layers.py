"""Linear layers: which card takes which numbers, what a packed weight is, what a call is refused for."""

from __future__ import annotations

import pytest
import torch

from delivery.errors import DataError, EnvironmentLacking
from delivery.kernels import linear_w4a16, linear_w8a8, linear_w16a16
from delivery.kernels.gpu.moe import sorted_pairs
from delivery.kernels.linear_w8a8_cases import random_packed
from delivery.kernels.w8_layout import pack, why_not_pack
from delivery.kernels.w8_rules import why_not_dtype_on
from delivery.qtensor import QTensor


@pytest.mark.parametrize(
    ("dtype", "capability", "reason"),
    [
        (torch.int8, (7, 0), None),
        (torch.int8, (6, 1), "int8 needs compute capability 7.0, this card has 6.1"),
        (torch.float8_e4m3fn, (8, 9), None),
        (torch.float8_e4m3fn, (8, 6), "float8_e4m3fn needs compute capability 8.9, this card has 8.6"),
        (torch.float8_e5m2, (8, 0), "float8_e5m2 needs compute capability 8.9, this card has 8.0"),
        (torch.float16, (9, 0), "torch.float16 is not an 8-bit type that is multiplied here"),
    ],
)
def test_the_card_decides_the_type(
    dtype: torch.dtype, capability: tuple[int, int], reason: str | None
) -> None:
    assert why_not_dtype_on(dtype, capability) == reason


def test_per_tensor_scales_become_per_channel() -> None:
    weight = QTensor(torch.ones(3, 4, dtype=torch.int8), torch.tensor([[0.5]]), None, -1, 8)
    packed = pack(weight)
    assert packed.scale.shape == (3, 1)
    assert torch.equal(packed.dequantize(torch.float32), torch.full((3, 4), 0.5))
    assert packed.size_bytes == 3 * 4 + 3 * 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bits": 4}, "expected int8 or float8, got 4 bits in torch.int8"),
        ({"zero_point": torch.zeros(2, 1, dtype=torch.uint8)}, "8-bit weights are symmetric here"),
        ({"block_size": 64}, "expected blocks of 128, got 64"),
        ({"block_size": 128}, "128-block scales belong to fp8 weights"),
        ({"scale": torch.ones(2, 2)}, "expected one scale per output channel or per tensor, got groups"),
    ],
)
def test_unsupported_eight_bit_weights(change: dict[str, object], reason: str) -> None:
    fields: dict[str, object] = {
        "qdata": torch.zeros(2, 8, dtype=torch.int8),
        "scale": torch.ones(2, 1),
        "zero_point": None,
        "group_size": -1,
        "bits": 8,
    }
    weight = QTensor(**(fields | change))  # type: ignore[arg-type]
    assert why_not_pack(weight) == reason
    with pytest.raises(DataError, match="has no packed 8-bit form"):
        pack(weight)


def test_a_named_backend_never_falls_back() -> None:
    x = torch.randn(2, 64)
    with pytest.raises(EnvironmentLacking, match="'hopper' cannot run this call"):
        linear_w16a16.OP(x, torch.randn(8, 64), backend="hopper")
    with pytest.raises(EnvironmentLacking, match="the tensor is on cpu"):
        linear_w8a8.OP(x, random_packed(8, 64, torch.float8_e5m2, 0), backend="scaled_mm")


def test_plain_and_quantised_input_agree() -> None:
    packed = random_packed(24, 96, torch.int8, 1)
    x = torch.randn(5, 96)
    values, scale = linear_w8a8.QUANTIZE(x, torch.int8)
    plain = linear_w8a8.OP(x, packed)
    quantised = linear_w8a8.OP(values, packed, None, None, scale, torch.float32)
    assert torch.equal(plain, quantised)


def test_act_order_and_bias_reach_the_answer() -> None:
    weight = linear_w4a16.random_weight(
        16, 64, 32, zero_point=True, act_order=True, seed=5, scale=torch.float32
    )
    x, bias = torch.randn(3, 64, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    got = linear_w4a16.OP.reference(x, linear_w4a16.pack(weight), bias)
    want = x @ weight.dequantize(torch.float64).t() + bias
    assert torch.allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("block", [2, 4, 16])
def test_pairs_are_sorted_by_expert_in_whole_blocks(block: int) -> None:
    experts = torch.tensor([[0, 3], [3, 1], [3, 0], [1, 3], [3, 0]])
    pairs, owner = sorted_pairs(experts, 5, block)
    flat = experts.reshape(-1)
    seen = []
    for index, expert in enumerate(owner.tolist()):
        inside = [p for p in pairs[index * block : (index + 1) * block].tolist() if p < flat.numel()]
        assert all(int(flat[p]) == expert for p in inside)
        seen += inside
    assert sorted(seen) == list(range(flat.numel()))
