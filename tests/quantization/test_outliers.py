"""Weights kept at 6 bit beside the 4-bit grid."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from delivery.engine.merging import merge
from delivery.kernels import w4_layout
from delivery.model.load import take_rows
from delivery.model.weights import Linear
from delivery.qtensor import QTensor
from delivery.quantization import quantize
from delivery.quantization.outliers import split_outliers


def kept(share: float = 0.01, seed: int = 0) -> tuple[torch.Tensor, QTensor]:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(32, 128, generator=random) * 0.02
    weight.view(-1)[torch.randperm(32 * 128, generator=random)[:20]] = 0.7
    rest, outliers = split_outliers(weight, None, share, torch.float16)
    return weight, replace(quantize(rest, group_size=32), outliers=outliers)


def test_the_largest_are_kept_and_no_longer_spoil_their_group() -> None:
    weight, q = kept()
    assert q.outliers is not None
    assert q.outliers.index.numel() == 41
    assert set((weight.reshape(-1) == 0.7).nonzero().flatten().tolist()) <= set(q.outliers.index.tolist())
    assert int(q.outliers.values.min()) >= -32
    assert int(q.outliers.values.max()) <= 31
    plain = quantize(weight, group_size=32)
    error, without = ((x.dequantize() - weight).norm() / weight.norm() for x in (q, plain))
    assert error < 0.35 * without
    assert q.bits_per_weight() < plain.bits_per_weight() + 1


def test_importance_of_channels_decides() -> None:
    weight = torch.ones(4, 64)
    importance = torch.ones(64)
    importance[9] = 5.0
    _, outliers = split_outliers(weight, importance, 4 / 256, torch.float32)
    assert (outliers.index % 64).tolist() == [9, 9, 9, 9]
    assert torch.allclose(outliers.values * outliers.scale, torch.ones(4))


def test_rows_can_be_taken() -> None:
    _, q = kept()
    rows = torch.tensor([30, 2, 17, 3])
    taken = take_rows(q, rows)
    assert isinstance(taken, QTensor)
    assert torch.equal(taken.dequantize(), q.dequantize()[rows])
    assert torch.equal(taken.to("cpu").dequantize(), taken.dequantize())


def test_what_knows_no_outliers_refuses_them() -> None:
    _, q = kept()
    assert "outliers" in (w4_layout.why_not_pack(q) or "")
    assert w4_layout.why_not_pack(replace(q, outliers=None)) is None
    assert merge([Linear("a", q), Linear("b", q)]) is None
    assert merge([Linear("a", replace(q, outliers=None))] * 2) is not None


def test_a_row_of_zeros_has_a_finite_scale() -> None:
    _, outliers = split_outliers(torch.zeros(3, 32), None, 0.05, torch.float16)
    assert bool(torch.isfinite(outliers.scale).all())
    assert outliers.values.tolist() == [0] * 5


@pytest.mark.parametrize("share", [1e-9, 0.1])
def test_any_share_keeps_at_least_one(share: float) -> None:
    _, q = kept(share)
    assert q.outliers is not None
    assert q.outliers.index.numel() == max(1, round(share * 4096))
