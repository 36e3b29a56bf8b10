"""The packed 4-bit layout: what goes in comes out, and every nibble lies where its definition says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delivery.errors import DataError
from delivery.kernels.linear_w4a16 import random_weight
from delivery.kernels.w4_layout import pack, unpack, why_not_pack
from delivery.qtensor import QTensor


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    group_size=st.sampled_from([32, 64, 128, 256, -1]),
    zero_point=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_unpacking_gives_the_same_weight(
    n: int, k: int, group_size: int, zero_point: bool, seed: int
) -> None:
    weight = random_weight(
        n, k, group_size, zero_point=zero_point, act_order=False, seed=seed, scale=torch.float16
    )
    again = unpack(pack(weight))
    assert torch.equal(again.dequantize(torch.float64), weight.dequantize(torch.float64))


@pytest.mark.parametrize("group_size", [32, 128])
def test_act_order_is_carried(group_size: int) -> None:
    weight = random_weight(40, 256, group_size, zero_point=True, act_order=True, seed=3, scale=torch.float32)
    packed = pack(weight)
    assert packed.order is not None
    assert torch.equal(unpack(packed).dequantize(torch.float64), weight.dequantize(torch.float64))


def test_a_nibble_lies_where_the_definition_says() -> None:
    values = torch.randint(0, 16, (512, 256), generator=torch.Generator().manual_seed(1))
    ones = torch.ones(512, 2, dtype=torch.float16)
    weight = QTensor(values.to(torch.uint8), ones, torch.zeros(512, 2, dtype=torch.uint8), 128, 4)
    words = pack(weight).words
    for n, k in ((0, 0), (8, 0), (1, 1), (300, 200), (511, 255), (77, 9), (130, 100)):
        bit = [(n >> i) & 1 for i in range(8)]
        kit = [(k >> i) & 1 for i in range(7)]
        row = ((n % 256) >> 4) * 8 + kit[6] * 4 + bit[2] * 2 + bit[1]
        column = bit[0] * 16 + kit[2] * 8 + kit[1] * 4 + kit[5] * 2 + kit[4]
        nibble = kit[0] * 4 + kit[3] * 2 + bit[3]
        word = int(words[n // 256, k // 128, row, column])
        assert (word >> (4 * nibble)) & 15 == int(values[n, k]), (n, k)


def test_what_cannot_be_packed_is_refused_with_the_reason() -> None:
    scale = torch.ones(4, 1)
    eight = QTensor(torch.zeros(4, 8, dtype=torch.int8), scale, None, -1, 8)
    assert why_not_pack(eight) == "expected 4-bit integers, got 8 bits in torch.int8"
    with pytest.raises(DataError, match="has no packed 4-bit form") as error:
        pack(eight)
    assert error.value.code == "unsupported-weight"
    grouped = QTensor(torch.zeros(4, 48, dtype=torch.int8), torch.ones(4, 1), None, 48, 4)
    assert why_not_pack(grouped) == "group size 48 is not a multiple of 32"
    uneven = torch.tensor([0] * 40 + [1] * 24, dtype=torch.int32)
    ragged = QTensor(torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 2), None, 32, 4, g_idx=uneven)
    assert why_not_pack(ragged) == "g_idx gives groups of unequal size"


def test_size_counts_words_scales_and_zero_points() -> None:
    weight = random_weight(256, 128, 128, zero_point=True, act_order=False, seed=0, scale=torch.float16)
    assert pack(weight).size_bytes == 256 * 128 // 2 + 256 * 2 + 256
