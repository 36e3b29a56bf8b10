"""SmoothQuant: the formula, planted outliers, and the search of its exponent."""

from __future__ import annotations

import pytest
import torch

from delivery.model.weights import fake_quantize
from delivery.quantization.eight_bit import int8_per_channel
from delivery.quantization.smooth import search_alpha, smooth_scale


def layer() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(300, 64, generator=random)
    x[:, ::16] *= 60
    return torch.randn(48, 64, generator=random) * 0.05, x


def w8a8_error(weight: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> float:
    out = fake_quantize(x / scale, torch.int8) @ int8_per_channel(weight * scale).dequantize().T
    return float((out - x @ weight.T).norm() / (x @ weight.T).norm())


def test_the_formula() -> None:
    act, weight = torch.tensor([16.0, 1.0, 0.0, 4.0]), torch.tensor([4.0, 1.0, 1.0, 0.0])
    assert smooth_scale(act, weight, 0.5).tolist() == pytest.approx([2.0, 1.0, 1.0, 1.0])
    assert smooth_scale(act, weight, 0.25)[0] == pytest.approx(16**0.25 / 4**0.75)


def test_planted_outliers_are_what_it_is_for() -> None:
    weight, x = layer()
    smoothed = smooth_scale(x.abs().amax(0), weight.abs().amax(0), 0.5)
    assert w8a8_error(weight, x, smoothed) < 0.4 * w8a8_error(weight, x, torch.ones(64))


def test_the_search_is_no_worse_than_the_usual_exponent() -> None:
    weight, x = layer()
    found = search_alpha(weight, x.T @ x, x.abs().amax(0), x[:100], torch.int8)
    usual = smooth_scale(x.abs().amax(0), weight.abs().amax(0), 0.5)
    assert w8a8_error(weight, x, found.scale) <= 1.02 * w8a8_error(weight, x, usual)
    assert found.loss < found.plain_loss
    assert 0 < found.alpha < 1
