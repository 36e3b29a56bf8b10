"""Which weights the CPU's kernels take, and that sums at the limits of what they take are right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from delivery.engine.forms_cpu import CpuForms
from delivery.kernels.cpu.layer import SMALL_ROWS, linear
from delivery.kernels.cpu.pack import pack, why_not_pack
from delivery.kernels.linear_w4a16 import random_weight
from delivery.model.weights import Linear
from delivery.qtensor import Outliers, QTensor


def four_bits(k: int, group_size: int) -> QTensor:
    return random_weight(16, k, group_size, zero_point=True, act_order=False, seed=1, scale=torch.float32)


def test_outliers_are_not_lost() -> None:
    apart = Outliers(torch.tensor([5, 70]), torch.tensor([31, -30], dtype=torch.int8), torch.ones(16))
    weight = replace(four_bits(64, 32), outliers=apart)
    assert why_not_pack(weight) == "outliers are kept apart, which no kernel reads"
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    got = CpuForms().linear(Linear("layer", weight, None))(x)
    torch.testing.assert_close(got, x @ weight.dequantize().t())


@pytest.mark.parametrize("rows", [1, 4, SMALL_ROWS + 1])
def test_the_longest_sums_of_bytes(rows: int) -> None:
    longest = 1 << 17
    weight = QTensor(
        torch.full((2, longest), -128, dtype=torch.int8), torch.ones(2, 1), None, -1, 8, act_dtype=torch.int8
    )
    assert why_not_pack(weight) is None
    got = linear(pack(weight), torch.ones(rows, longest))
    torch.testing.assert_close(got, torch.full((rows, 2), -128.0 * longest))
    longer = replace(weight, qdata=torch.full((2, longest + 32), -128, dtype=torch.int8))
    assert "do not fit into 32 bits" in str(why_not_pack(longer))


@pytest.mark.parametrize("rows", [1, 2, 4, SMALL_ROWS + 1])
def test_the_largest_groups(rows: int) -> None:
    longest = 1 << 15
    weight = four_bits(longest, longest)
    weight.qdata.fill_(15)
    assert weight.zero_point is not None
    weight.zero_point.fill_(0)
    assert why_not_pack(weight) is None
    got = linear(pack(weight), torch.ones(rows, longest))
    want = weight.dequantize(torch.float64).sum(1).float().expand(rows, -1)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=0)
    assert "do not fit into 32 bits" in str(why_not_pack(four_bits(2 * longest, 2 * longest)))
