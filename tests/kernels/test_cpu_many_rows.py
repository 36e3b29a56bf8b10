"""Linear layers of many rows on a CPU: every stored form, odd sizes, and rows that do not meet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from delivery.kernels.cpu import layer
from delivery.kernels.cpu.layer import SMALL_ROWS, linear
from delivery.kernels.cpu.pack import pack
from delivery.kernels.cpu.program import Crew
from delivery.kernels.linear_w4a16 import random_weight
from delivery.qtensor import QTensor

MANY = (SMALL_ROWS + 1, SMALL_ROWS + 4, 6 * 17 + 2)


def _rows(count: int, k: int) -> torch.Tensor:
    x = torch.randn(count, k, generator=torch.Generator().manual_seed(4))
    return x * torch.logspace(-3, 3, count)[:, None]  # each row has scales of its own


def _eight_bit(n: int, k: int, dtype: torch.dtype, act: torch.dtype | None) -> QTensor:
    generator = torch.Generator().manual_seed(7)
    limit = 127 if dtype == torch.int8 else 1.0
    values = (torch.rand(n, k, generator=generator) * 2 - 1) * limit
    data = values.round().to(dtype) if dtype == torch.int8 else values.to(dtype)
    scale = torch.rand(n, 1, generator=generator) + 0.5
    return QTensor(data, scale, None, -1, 8, act_dtype=act)


@pytest.mark.parametrize(
    ("group_size", "act_order"),
    [*((size, False) for size in (32, 64, 96, 128, -1)), (32, True), (64, True)],
)
@pytest.mark.parametrize("scale", [torch.float16, torch.float32], ids=str)
def test_four_bits_are_exact_but_for_the_rounding_of_inputs(
    group_size: int, act_order: bool, scale: torch.dtype
) -> None:
    k = 384 if group_size == 96 else 256
    weight = random_weight(
        37, k, group_size, zero_point=not act_order, act_order=act_order, seed=3, scale=scale
    )
    bias = torch.randn(37, generator=torch.Generator().manual_seed(5))
    packed, x = pack(weight, bias), _rows(MANY[-1], k)
    exact = weight.dequantize(torch.float64)
    want = x.double() @ exact.t() + bias
    # Rounding to int16 moves an input by half a step: 1/65278 of its group's largest.
    bound = (x.abs().amax(1, keepdim=True).double() / 65278) * exact.abs().sum(1)
    got = linear(packed, x)
    assert ((got - want).abs() <= bound + 1e-5 * want.abs() + 1e-6).all()
    for rows in MANY:
        assert torch.equal(linear(packed, x[-rows:]), got[-rows:]), rows


def test_groups_too_large_for_sums_of_32_bits_are_multiplied_in_float32() -> None:
    k = 8192
    weight = random_weight(20, k, k, zero_point=True, act_order=False, seed=3, scale=torch.float32)
    # The worst case of integers: everything at its largest, with one sign.
    weight.qdata.fill_(15)
    assert weight.zero_point is not None
    weight.zero_point.fill_(0)
    x = torch.full((MANY[0], k), 3.0)
    want = x.double() @ weight.dequantize(torch.float64).t()
    got = linear(pack(weight), x)
    assert (got - want).norm() < 2e-5 * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [96, 75])
def test_floats(dtype: torch.dtype, k: int) -> None:
    weight = torch.randn(50, k, generator=torch.Generator().manual_seed(6)).to(dtype)
    packed, x = pack(weight), _rows(MANY[-1], k)
    got = linear(packed, x)
    want = x.double() @ weight.double().t()
    assert ((got - want).norm(dim=1) <= 1e-6 * want.norm(dim=1)).all()
    for rows in MANY:
        assert torch.equal(linear(packed, x[-rows:]), got[-rows:]), rows


@pytest.mark.parametrize(
    ("dtype", "act"),
    [
        (torch.int8, None),
        (torch.int8, torch.int8),
        (torch.float8_e4m3fn, None),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.float8_e5m2, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("k", [96, 75])
def test_eight_bits_give_what_few_rows_give(dtype: torch.dtype, act: torch.dtype | None, k: int) -> None:
    packed, x = pack(_eight_bit(40, k, dtype, act)), _rows(MANY[-1], k)
    got = linear(packed, x)
    few = torch.cat([linear(packed, part) for part in x.split(SMALL_ROWS)])
    assert ((got - few).norm(dim=1) <= 2e-6 * few.norm(dim=1)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 2, 5, SMALL_ROWS + 1])
@pytest.mark.parametrize("form", ["w4", "int8", "bfloat16"])
def test_what_is_no_number_stays_none_and_in_its_row(form: str, rows: int, bad: float) -> None:
    weight: QTensor | torch.Tensor = torch.ones(20, 96, dtype=torch.bfloat16)
    if form == "w4":
        weight = random_weight(20, 96, 32, zero_point=True, act_order=False, seed=3, scale=torch.float16)
    elif form == "int8":
        weight = _eight_bit(20, 96, torch.int8, torch.int8)
    packed, x = pack(weight), _rows(rows, 96)
    want = linear(packed, x)
    x[-1, 40] = bad
    got = linear(packed, x)
    assert not got[-1].isfinite().any()
    assert torch.equal(got[:-1], want[:-1])


@pytest.mark.parametrize("form", ["w4", "bfloat16"])
def test_any_number_of_threads_gives_the_same_numbers(
    form: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    weight: QTensor | torch.Tensor = random_weight(
        300, 256, 64, zero_point=True, act_order=False, seed=5, scale=torch.float16
    )
    if form == "bfloat16":
        assert isinstance(weight, QTensor)
        weight = weight.dequantize(torch.bfloat16)
    x = _rows(50, 256)
    results = []
    for threads in (1, 2, 3):
        crew = Crew(threads)
        request.addfinalizer(crew.close)
        monkeypatch.setattr(layer, "crew", _constant(crew))
        results += [linear(pack(weight), x) for _ in range(10 * threads)]
    assert all(torch.equal(result, results[0]) for result in results)


def _constant(crew: Crew) -> Callable[[], Crew]:
    return lambda: crew
