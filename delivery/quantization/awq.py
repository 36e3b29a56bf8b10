"""AWQ: activation-aware scales for 4-bit weights (Lin et al. 2023, arXiv:2306.00978).

Salient input channels are scaled up before rounding; what feeds them is divided by the same scale.
The paper scores a candidate by running the block; here its error on the layer's outputs is read
off the Gram matrix G = Σ x xᵀ, which is accumulated once: N·K² operations per candidate instead of
tokens·N·K, and no activation is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from delivery.quantization.grid import Grid, grouped, rounding_error
from delivery.quantization.measure import row_losses
from delivery.quantization.statistics import tf32

Duo = Literal["off", "on", "both"]

_EPSILON = 1e-5
_HOPELESS = 1.15
_ROWS = 128
_PIECE = 1 << 18
"""Weights that are clipped at a time on a CPU: what stays in its cache."""
_Scored = tuple[torch.Tensor, float]


@dataclass(frozen=True, slots=True)
class Search:
    """How scales are searched.

    points: ratios tried in (0, 1] on the full grid; 0 searches coarse to fine instead (13 points or
        so for each form, about as good). duo: divide by the weights' own mean magnitude to the power
        1 − ratio as well, as the authors' code does; "both" tries with and without.
    weights: about how many weights a candidate is scored on, in evenly spaced rows (at least 128); 0 for
        all, None for 2^17 on a CPU and 2^22 on a GPU. A search chooses one number and a form, so some
        10^5 weights rank candidates as all would.
    """

    points: int = 0
    duo: Duo = "both"
    weights: int | None = None


_DEFAULT = Search()


@dataclass(frozen=True, slots=True)
class Found:
    """scale: float32 [K], 1 for no change. loss, plain_loss: squared output error with and without it."""

    scale: torch.Tensor
    loss: float
    plain_loss: float
    ratio: float


def search_scale(
    weight: torch.Tensor,
    gram: torch.Tensor,
    grid: Grid,
    search: Search = _DEFAULT,
    tie: Callable[[torch.Tensor], torch.Tensor] | None = None,
    matter: torch.Tensor | None = None,
) -> Found:
    """The best scale for the input channels of weight [N, K] (all layers on one input, joined along N).

    gram: float32 [K, K]. tie: makes a scale one that the feeding layer can take (query heads that
    share values), before it is scored. matter: [N], weight of each row's squared error, None for 1.
    Nothing is changed in place; the result is finite and positive.
    """
    index = _spread(weight, search.weights)
    rows = weight[index].float()
    weights = torch.ones(rows.shape[0], device=weight.device) if matter is None else matter[index]
    importance = gram.diagonal().clamp_min(0).sqrt()
    plain = _loss(rows, torch.ones_like(importance), gram, grid, weights)
    best = Found(torch.ones_like(importance), plain, plain, 0.0)
    forms = {"off": (False,), "on": (True,), "both": (False, True)}[search.duo]
    spread = _weight_spread(weight.float(), grid) if True in forms else None
    for duo in forms:

        def score(ratio: float, used: torch.Tensor | None = spread if duo else None) -> _Scored:
            scale = candidate(importance, ratio, used)
            scale = scale if tie is None else tie(scale)
            return scale, _loss(rows, scale, gram, grid, weights)

        for ratio, (scale, loss) in _ratios(search.points, score, best.loss, from_zero=duo):
            if loss < best.loss:
                best = Found(scale, loss, plain, ratio)
    return best


def search_shrink(
    weight: torch.Tensor, gram: torch.Tensor, grid: Grid, points: int = 10, lowest: float = 0.5
) -> torch.Tensor:
    """Clipping: per row and group, the factor in [lowest, 1] on the range that loses least → [N, K/g].

    A group's error is weighed by its own block of the Gram matrix; a row then keeps its factors only
    if its error over the whole matrix is lower with them, so no row gets worse.
    """
    grouped(weight[:1], grid)  # raises for a group size that does not divide
    width = grid.width(weight.shape[1])
    count = weight.shape[1] // width
    blocks = gram.reshape(count, width, count, width).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
    factors = [1 - (1 - lowest) * step / points for step in range(1, points + 1)]
    some = max(1, (_PIECE if weight.device.type == "cpu" else weight.numel()) // weight.shape[1])
    return torch.cat([_shrink_of(rows, gram, blocks, grid, factors) for rows in weight.split(some)])


def _shrink_of(
    weight: torch.Tensor, gram: torch.Tensor, blocks: torch.Tensor, grid: Grid, factors: list[float]
) -> torch.Tensor:
    plain = rounding_error(weight, grid)
    best_loss = _group_losses(plain, blocks)
    best = torch.ones_like(best_loss)
    for value in factors:
        factor = torch.full_like(best, value)
        loss = _group_losses(rounding_error(weight, grid, factor), blocks)
        better = loss < best_loss
        best_loss = torch.where(better, loss, best_loss)
        best = torch.where(better, factor, best)
    clipped = row_losses(rounding_error(weight, grid, best), gram)
    return torch.where((clipped < row_losses(plain, gram))[:, None], best, torch.ones_like(best))


def candidate(importance: torch.Tensor, ratio: float, spread: torch.Tensor | None) -> torch.Tensor:
    """importance^ratio (over spread^(1 − ratio)), centred so that √(max · min) = 1 → float32 [K].

    Channels where that is not finite or far off (dead ones) get 1.
    """
    scale = importance.clamp_min(_EPSILON * float(importance.max())).pow(ratio)
    if spread is not None:
        scale = scale / spread.pow(1 - ratio).clamp_min(_EPSILON)
    scale = scale.clamp_min(1e-12)
    scale = scale / (scale.max() * scale.min()).sqrt()
    return torch.where(torch.isfinite(scale) & (scale > 0), scale, torch.ones_like(scale))


def _ratios(
    points: int, score: Callable[[float], _Scored], known: float, from_zero: bool
) -> Iterator[tuple[float, _Scored]]:
    """Ratios with their scores: `points` even ones, or coarse to fine. Ratio 0 is no scale without duo.

    known: the best loss so far; a form that is nowhere near it on the coarse grid is not refined.
    """
    if points:
        for step in range(0 if from_zero else 1, points + 1):
            yield step / points, score(step / points)
        return
    # The loss is smooth in the ratio but for the noise of rounding: five points, then halve around the best.
    tried: dict[float, float] = {}
    ratios = [0.0, 0.25, 0.5, 0.75, 1.0][0 if from_zero else 1 :]
    width = 0.25
    while width > 0.03:
        for ratio in ratios:
            found = score(ratio)
            tried[ratio] = found[1]
            yield ratio, found
        centre = min(tried, key=lambda r: tried[r])
        if tried[centre] > _HOPELESS * known:
            return
        width /= 2
        ratios = [r for r in (centre - width, centre + width) if 0 <= r <= 1 and r not in tried]


def _loss(
    weight: torch.Tensor, scale: torch.Tensor, gram: torch.Tensor, grid: Grid, weights: torch.Tensor
) -> float:
    error = rounding_error(weight * scale, grid).div_(scale)
    return float((row_losses(error, gram) * weights).sum(dtype=torch.float64))


def _weight_spread(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Mean over rows of |w| / (largest |w| of its group): how much of its group's range a channel uses."""
    groups = grouped(weight, grid).abs()
    peak = groups.amax(-1, keepdim=True).clamp_min(1e-12)
    return (groups / peak).mean(0).reshape(-1).clamp_min(1e-4)


def _group_losses(error: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    count, width = blocks.shape[:2]
    by_group = error.reshape(-1, count, width).transpose(0, 1)
    with tf32(error.device):
        return (torch.bmm(by_group, blocks) * by_group).sum(-1).T


def _spread(weight: torch.Tensor, weights: int | None) -> torch.Tensor:
    """Evenly spaced rows that hold about so many weights: int64 [n]."""
    if weights is None:
        weights = 1 << (22 if weight.device.type == "cuda" else 17)
    count = weight.shape[0] if not weights else max(_ROWS, weights // weight.shape[1])
    last = weight.shape[0] - 1
    return torch.linspace(0, last, min(count, last + 1), device=weight.device).round().long()
