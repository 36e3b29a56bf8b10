"""Integer grids: bounds, scales, zero points, and the cases that break other tools."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delivery.errors import DataError, UsageError
from delivery.quantization import Grid, dequantize, quantize
from delivery.quantization.grid import round_to_grid, rounding_error


def weight(rows: int = 8, columns: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    group_size=st.sampled_from([-1, 16, 32, 64]),
    symmetric=st.booleans(),
    narrow=st.booleans(),
    exponent=st.integers(-12, 6),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_no_value_is_further_off_than_half_a_step(
    bits: int, group_size: int, symmetric: bool, narrow: bool, exponent: int, seed: int
) -> None:
    w = weight(seed=seed) * 2.0**exponent
    q = quantize(w, bits, group_size, symmetric, narrow, torch.float32)
    step = q.scale.repeat_interleave(64 // q.scale.shape[1], 1)
    # The full symmetric grid has one step less above zero, so its largest value may lose a whole one.
    allowed = 1.01 if symmetric and not narrow else 0.51
    assert bool(((dequantize(q) - w).abs() <= allowed * step + 1e-12).all())


def test_the_two_symmetric_grids_are_those_that_are_stated() -> None:
    w = weight()
    peak = w.reshape(8, 2, 32).abs().amax(-1)
    full = quantize(w, 4, 32, symmetric=True, scale_dtype=torch.float32)
    narrow = quantize(w, 4, 32, symmetric=True, narrow=True, scale_dtype=torch.float32)
    assert torch.allclose(full.scale, peak / 7.5)
    assert int(full.qdata.min()) == -8
    assert torch.allclose(narrow.scale, peak / 7)
    assert int(narrow.qdata.min()) >= -7
    assert full.zero_point is None


def test_asymmetric_uses_the_whole_range_of_each_group() -> None:
    w = weight().abs() + 0.5
    w[:, :32] *= -1
    q = quantize(w, 4, 32, scale_dtype=torch.float32)
    assert q.zero_point is not None
    assert q.qdata.dtype == torch.uint8
    assert torch.equal(q.zero_point[:, 0], torch.full((8,), 15, dtype=torch.uint8))
    assert torch.equal(q.zero_point[:, 1], torch.zeros(8, dtype=torch.uint8))
    assert torch.allclose(dequantize(q)[:, :32].amin(1), w[:, :32].amin(1))


def test_a_grid_that_holds_the_weight_gives_it_back() -> None:
    q = quantize(weight(), 4, 32, scale_dtype=torch.float16)
    again = quantize(dequantize(q), 4, 32, scale_dtype=torch.float16)
    assert torch.allclose(dequantize(again), dequantize(q), atol=2e-3)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("fill", [0.0, 3.0, -2.0, 1e-9])
def test_constant_groups_have_finite_scales_and_come_back(symmetric: bool, fill: float) -> None:
    w = weight()
    w[2, :32] = fill
    q = quantize(w, 4, 32, symmetric)
    assert bool(torch.isfinite(q.scale).all())
    assert bool((q.scale > 0).all())
    assert torch.allclose(dequantize(q)[2, :32], w[2, :32], rtol=0.07, atol=1e-6)


def test_values_are_rounded_against_the_stored_scale() -> None:
    q = quantize(weight(), 4, 32, scale_dtype=torch.bfloat16)
    assert q.scale.dtype == torch.bfloat16
    expected = (weight().reshape(8, 2, 32) / q.scale.float()[..., None]).round()
    assert q.zero_point is not None
    expected = (expected + q.zero_point.float()[..., None]).clamp(0, 15).reshape(8, 64)
    assert torch.equal(q.qdata.float(), expected)


@pytest.mark.parametrize("symmetric", [False, True])
def test_rounding_error_is_that_of_the_qtensor(symmetric: bool) -> None:
    w, grid = weight(), Grid(4, 32, symmetric)
    shrink = torch.rand(8, 2, generator=torch.Generator().manual_seed(1)) * 0.5 + 0.5
    for factor in (None, shrink):
        expected = dequantize(round_to_grid(w, grid, factor)) - w
        assert torch.allclose(rounding_error(w, grid, factor), expected, atol=1e-6)


def test_bad_input_is_named() -> None:
    with pytest.raises(DataError, match=r"60 input features cannot be split into groups of 32"):
        quantize(weight(columns=60), 4, 32)
    broken = weight()
    broken[0, 0] = float("inf")
    with pytest.raises(DataError, match=r"scales that are not finite"):
        quantize(broken, 4, 32)


@pytest.mark.parametrize("symmetric", [False, True])
def test_views_in_any_order_give_what_their_copies_give(symmetric: bool) -> None:
    whole = weight(64, 128)
    for view in (whole.t(), whole[::2, ::2], whole[:1].expand(8, 128)):
        q = quantize(view, 4, 32, symmetric)
        assert q.qdata.is_contiguous()  # it is written to files and viewed as words
        assert torch.equal(q.qdata, quantize(view.contiguous(), 4, 32, symmetric).qdata)


@pytest.mark.parametrize("bits", [0, 1, 9, 16, 4.5])
def test_bits_that_do_not_fit_are_refused(bits: int) -> None:
    with pytest.raises(UsageError, match="2 to 8"):
        quantize(weight(), bits, 32)


@pytest.mark.parametrize(
    "bad", [torch.zeros(32), torch.zeros(2, 4, 32), torch.ones(4, 32, dtype=torch.int32)], ids=str
)
def test_what_is_no_matrix_of_floats_is_refused(bad: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="expected a matrix"):
        quantize(bad, 4, 32)
