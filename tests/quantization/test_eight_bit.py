"""Eight-bit weights: int8 and FP8, per channel, per tensor, per block."""

from __future__ import annotations

import pytest
import torch

from delivery.quantization.eight_bit import (
    fp8_per_block,
    fp8_per_channel,
    fp8_per_tensor,
    int8_per_channel,
    limit,
)


def weight(rows: int = 200, columns: int = 300) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02


def test_int8_scale_is_absmax_over_127() -> None:
    q = int8_per_channel(weight())
    assert torch.allclose(q.scale, weight().abs().amax(1, keepdim=True) / 127)
    assert q.act_dtype == torch.int8
    assert int(q.qdata.min()) >= -127
    assert bool(((q.dequantize() - weight()).abs() <= 0.5001 * q.scale).all())
    assert int8_per_channel(weight(), act_dtype=None).act_dtype is None


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float8_e4m3fn, 1 / 16), (torch.float8_e5m2, 1 / 8)])
def test_fp8_rounds_to_the_nearest_of_its_grid(dtype: torch.dtype, relative: float) -> None:
    q = fp8_per_channel(weight(), dtype)
    large = weight().abs() > weight().abs().amax(1, keepdim=True) / 100
    error = ((q.dequantize() - weight()).abs() / weight().abs())[large]
    assert float(error.max()) <= relative
    assert float(q.qdata.float().abs().amax(1).min()) == limit(dtype)
    assert q.act_dtype == dtype


def test_static_fp8_has_one_scale_for_each_side() -> None:
    q = fp8_per_tensor(weight(), input_absmax=12.0)
    assert q.scale.shape == (1, 1)
    assert q.input_scale is not None
    assert float(q.input_scale) == pytest.approx(12 / 448)
    assert float((q.dequantize() - weight()).norm() / weight().norm()) < 0.04


def test_blocks_are_scaled_apart_and_edges_kept() -> None:
    w = weight()
    w[:128, :128] *= 1000
    q = fp8_per_block(w)
    assert q.scale.shape == (2, 3)
    assert float(q.scale[0, 0] / q.scale[1, 2]) > 500
    assert q.shape == (200, 300)
    error = (q.dequantize() - w).norm(dim=1) / w.norm(dim=1)
    assert float(error.max()) < 0.05


@pytest.mark.parametrize("make", [int8_per_channel, fp8_per_channel, fp8_per_block])
def test_a_row_of_zeros_stays_zero(make: object) -> None:
    w = weight()
    w[5] = 0
    q = make(w)  # type: ignore[operator]
    assert bool(torch.isfinite(q.scale).all())
    assert float(q.dequantize()[5].abs().max()) == 0.0
