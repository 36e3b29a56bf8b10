"""Keep the few weights that matter most out of the 4-bit grid, at 6 bits each."""

from __future__ import annotations

import torch

from delivery.qtensor import Outliers
from delivery.quantization.grid import storable

BITS = 6


def split_outliers(
    weight: torch.Tensor, importance: torch.Tensor | None, share: float, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, Outliers]:
    """The weight [N, K] with its outliers set to zero, in float32, and the outliers.

    importance: float32 [K], L2 of each input channel, None for 1; a weight's importance is |w| times that
    of its channel. share: of all weights, such as 0.001; at least one is kept.
    """
    weight = weight.float()
    score = weight.abs() if importance is None else weight.abs() * importance
    count = max(1, round(share * weight.numel()))
    index = score.reshape(-1).topk(count).indices.sort().values
    rows = index // weight.shape[1]
    chosen = weight.reshape(-1)[index]
    peak = torch.zeros(weight.shape[0], device=weight.device)
    peak.scatter_reduce_(0, rows, chosen.abs(), "amax")
    high = 2 ** (BITS - 1) - 1
    scale = storable(peak / high, scale_dtype)
    values = (chosen / scale.float()[rows]).round_().clamp_(-high - 1, high).to(torch.int8)
    rest = weight.clone()
    rest.view(-1)[index] = 0.0
    return rest, Outliers(index, values, scale, BITS)
