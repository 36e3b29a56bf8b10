"""Statistics of activations: what is counted, in pieces as in one, and what is left out."""

from __future__ import annotations

import pytest
import torch

from delivery.quantization.statistics import InputStatistics, accumulate_gram


def activations(tokens: int = 700, features: int = 24) -> torch.Tensor:
    return torch.randn(tokens, features, generator=torch.Generator().manual_seed(0)) * torch.arange(
        1, features + 1
    )


def test_pieces_add_up_to_the_whole() -> None:
    x = activations()
    found = InputStatistics(24, with_gram=True)
    for piece in x.split([300, 1, 0, 399]):
        found.update(piece)
    assert found.tokens == 700
    assert torch.allclose(found.absmax, x.abs().amax(0))
    assert torch.allclose(found.mean_abs(), x.abs().mean(0), rtol=1e-5)
    assert torch.allclose(found.l2(), x.square().mean(0).sqrt(), rtol=1e-5)
    assert found.gram is not None
    assert torch.allclose(found.gram, x.T @ x, rtol=1e-4, atol=1e-1)


def test_a_gram_matrix_in_blocks_is_the_same() -> None:
    x = torch.randn(50, 1500, generator=torch.Generator().manual_seed(1))
    gram = torch.zeros(1500, 1500)
    accumulate_gram(gram, x)
    accumulate_gram(gram, x.to(torch.bfloat16))
    expected = x.T @ x + x.bfloat16().float().T @ x.bfloat16().float()
    assert torch.allclose(gram, expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(gram, gram.T)


def test_the_range_leaves_out_one_value_in_a_thousand() -> None:
    found = InputStatistics(10)
    found.update(torch.linspace(-1, 1, 100_000).reshape(-1, 10))
    low, high = found.range_999()
    assert low == pytest.approx(-0.999, abs=2e-4)
    assert high == pytest.approx(0.999, abs=2e-4)
    found = InputStatistics(1024)
    for _ in range(6):
        found.update(torch.randn(700, 1024, generator=torch.Generator().manual_seed(0)))
    assert found.range_999()[1] == pytest.approx(3.29, abs=0.1)


def test_tokens_with_infinities_are_left_out_and_counted() -> None:
    x = activations()
    x[3, 2], x[9, 0] = float("inf"), float("nan")
    found = InputStatistics(24, with_gram=True)
    found.update(x)
    assert found.not_finite == 2
    assert found.tokens == 698
    assert found.gram is not None
    assert bool(torch.isfinite(found.gram).all())
    found.update(torch.full((2, 24), float("inf")))
    assert found.tokens == 698


def test_divided_inputs_have_divided_statistics() -> None:
    x, scale = activations(), torch.linspace(0.5, 3, 24)
    one, other = InputStatistics(24, with_gram=True), InputStatistics(24, with_gram=True)
    one.update(x)
    one.divide(scale)
    other.update(x / scale)
    for a, b in ((one.absmax, other.absmax), (one.l2(), other.l2()), (one.mean_abs(), other.mean_abs())):
        assert torch.allclose(a, b, rtol=1e-4)
    assert one.gram is not None
    assert other.gram is not None
    assert torch.allclose(one.gram, other.gram, rtol=1e-3, atol=1e-1)
