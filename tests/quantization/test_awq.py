"""AWQ: the search over the Gram matrix, clipping, and the search of the paper as the reference."""

from __future__ import annotations

import pytest
import torch

from delivery.quantization.awq import Search, candidate, search_scale, search_shrink
from delivery.quantization.grid import Grid, round_to_grid, rounding_error
from delivery.quantization.measure import relative_error, row_losses

GRID = Grid(4, 32)


def layer(seed: int = 0, columns: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and activations with a few channels that carry much."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(400, columns, generator=random)
    x[:, :: columns // 4] *= 40
    return torch.randn(96, columns, generator=random) * 0.05, x


def direct_loss(weight: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> float:
    q = round_to_grid(weight * scale, GRID)
    return float(((x / scale) @ q.dequantize().T - x @ weight.T).square().sum())


def test_a_gram_matrix_gives_the_loss_over_all_tokens() -> None:
    weight, x = layer()
    found = search_scale(weight, x.T @ x, GRID, Search(weights=0))
    assert found.loss == pytest.approx(direct_loss(weight, x, found.scale), rel=1e-3)
    assert found.plain_loss == pytest.approx(direct_loss(weight, x, torch.ones(128)), rel=1e-3)


@pytest.mark.parametrize("duo", ["off", "on", "both"])
@pytest.mark.parametrize("points", [0, 20])
def test_planted_outliers_gain_plainly(duo: str, points: int) -> None:
    weight, x = layer()
    found = search_scale(weight, x.T @ x, GRID, Search(points=points, duo=duo))  # type: ignore[arg-type]
    assert found.loss < 0.4 * found.plain_loss
    assert 0 < found.ratio <= 1


def test_coarse_to_fine_is_as_good_as_the_full_grid() -> None:
    for seed in range(4):
        weight, x = layer(seed)
        gram = x.T @ x
        full = search_scale(weight, gram, GRID, Search(points=20, weights=0))
        fast = search_scale(weight, gram, GRID, Search(points=0, weights=0))
        assert fast.loss < 1.08 * full.loss  # rounding noise of 96 rows


def test_some_rows_rank_candidates_as_all_do() -> None:
    weight, x = layer()
    weight = torch.cat([weight, *(layer(seed)[0] for seed in (1, 2, 3))])
    gram = x.T @ x
    scale = search_scale(weight, gram, GRID, Search(weights=1)).scale
    best = search_scale(weight, gram, GRID, Search(weights=0))
    assert direct_loss(weight, x, scale) < 1.05 * best.loss


def test_a_tie_is_kept_by_every_candidate() -> None:
    weight, x = layer()

    def tie(scale: torch.Tensor) -> torch.Tensor:
        return scale.reshape(2, 64).log().mean(0).exp().repeat(2)

    scale = search_scale(weight, x.T @ x, GRID, tie=tie).scale
    assert torch.allclose(scale[:64], scale[64:])


def test_dead_channels_get_a_usable_scale() -> None:
    weight, x = layer()
    x[:, 5] = 0
    weight[:, 9] = 0
    for duo in ("off", "on"):
        found = search_scale(weight, x.T @ x, GRID, Search(duo=duo))  # type: ignore[arg-type]
        assert bool(torch.isfinite(found.scale).all())
        assert bool((found.scale > 0).all())
    assert torch.equal(candidate(torch.zeros(8), 0.5, None), torch.ones(8))


def test_clipping_never_makes_a_row_worse() -> None:
    weight, x = layer()
    weight[::3, ::32] *= 8
    gram = x.T @ x
    shrink = search_shrink(weight, gram, GRID)
    before = row_losses(rounding_error(weight, GRID), gram)
    after = row_losses(rounding_error(weight, GRID, shrink), gram)
    assert bool((after <= before * 1.0001).all())
    assert float(after.sum()) < 0.97 * float(before.sum())
    assert float(shrink.min()) >= 0.5


def test_awq_then_clipping_beats_awq_beats_rounding() -> None:
    weight, x = layer()
    gram = x.T @ x
    plain = relative_error(rounding_error(weight, GRID), weight, gram)
    scale = search_scale(weight, gram, GRID).scale
    scaled, moved = weight * scale, gram / scale / scale[:, None]
    awq = relative_error(rounding_error(scaled, GRID), scaled, moved)
    shrink = search_shrink(scaled, moved, GRID)
    clipped = relative_error(rounding_error(scaled, GRID, shrink), scaled, moved)
    assert clipped < 0.99 * awq
    assert awq < 0.7 * plain
