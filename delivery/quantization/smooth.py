"""SmoothQuant's scales (Xiao et al. 2022, arXiv:2211.10438): move outliers from activations to weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from delivery.model.weights import fake_quantize
from delivery.qtensor import QTensor
from delivery.quantization.eight_bit import fp8_per_channel, int8_per_channel
from delivery.quantization.measure import row_losses

_EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class Found:
    """scale: float32 [K]. alpha: its exponent, 0 for none. loss, plain_loss: expected squared error."""

    scale: torch.Tensor
    alpha: float
    loss: float
    plain_loss: float


def smooth_scale(act_absmax: torch.Tensor, weight_absmax: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """act_absmax^α / weight_absmax^(1−α) per input channel → float32 [K], finite and positive.

    A channel without activation or without weight keeps 1: there is nothing to move.
    """
    act, weight = act_absmax.float(), weight_absmax.float()
    scale = act.pow(alpha) / weight.clamp_min(_EPSILON).pow(1 - alpha)
    usable = (act > 0) & (weight > 0) & torch.isfinite(scale)
    return torch.where(usable, scale, torch.ones_like(scale)).clamp(_EPSILON, 1 / _EPSILON)


def search_alpha(
    weight: torch.Tensor,
    gram: torch.Tensor,
    act_absmax: torch.Tensor,
    sample: torch.Tensor,
    dtype: torch.dtype,
    points: int = 10,
    rows: int = 2048,
) -> Found:
    """The α in 0.1 .. 0.9 with the least output error, by search as in AWQ (`--search-scale`).

    weight [N, K]: all layers on one input, joined; gram [K, K]: of all its tokens; sample [T, K]: a few
    hundred of them, on which rounding the activations is tried. The error is that of the weights over
    the Gram matrix plus that of the activations over the sample, scaled to all tokens: the two are
    independent, so their squares add.
    """
    weight = weight.float()
    if rows and weight.shape[0] > rows:
        weight = weight[torch.linspace(0, weight.shape[0] - 1, rows, device=weight.device).long()]
    tokens = _tokens_ratio(gram, sample)

    def loss(scale: torch.Tensor) -> float:
        scaled = weight * scale
        error = (_rounded(scaled, dtype).dequantize() - scaled) / scale
        lost = float(row_losses(error, gram).sum(dtype=torch.float64))
        smooth = sample.float() / scale
        moved = (fake_quantize(smooth, dtype) - smooth) @ scaled.T
        return lost + tokens * float(moved.square().sum(dtype=torch.float64))

    plain = loss(torch.ones_like(act_absmax))
    best = Found(torch.ones_like(act_absmax), 0.0, plain, plain)
    weight_absmax = weight.abs().amax(0)
    for step in range(1, points):
        alpha = step / points
        scale = smooth_scale(act_absmax, weight_absmax, alpha)
        if (lost := loss(scale)) < best.loss:
            best = Found(scale, alpha, lost, plain)
    return best


def _rounded(weight: torch.Tensor, dtype: torch.dtype) -> QTensor:
    return int8_per_channel(weight) if dtype == torch.int8 else fp8_per_channel(weight, dtype)


def _tokens_ratio(gram: torch.Tensor, sample: torch.Tensor) -> float:
    """How much more energy all tokens carry than the sample."""
    energy = float(sample.float().square().sum(dtype=torch.float64))
    return float(gram.diagonal().sum(dtype=torch.float64)) / energy if energy else 0.0
