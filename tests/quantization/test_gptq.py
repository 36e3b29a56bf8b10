"""GPTQ: the factor of the inverse Hessian, orders, damping, and what happens when nothing factors."""

from __future__ import annotations

import pytest
import torch

from delivery.quantization.gptq import Solver, inverse_factor, solve
from delivery.quantization.grid import Grid, round_to_grid
from delivery.quantization.measure import relative_error

GRID = Grid(4, 32)


def layer(columns: int = 160) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and the Gram matrix of correlated activations with uneven channels."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(900, columns, generator=random) @ torch.randn(columns, columns, generator=random)
    x[:, ::40] *= 10
    return torch.randn(48, columns, generator=random) * 0.05, x.T @ x


def test_the_factor_is_that_of_the_damped_inverse() -> None:
    _, gram = layer()
    factor, damping = inverse_factor(gram.double(), 0.01)
    assert factor is not None
    assert damping == 0.01
    damped = gram.double() + 0.01 * torch.diag(gram.diagonal().double())
    assert torch.allclose(factor.T @ factor @ damped, torch.eye(160, dtype=torch.float64), atol=1e-8)
    assert torch.equal(factor, factor.triu())


@pytest.mark.parametrize("act_order", ["off", "static", "group"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_errors_are_made_up_for(act_order: str, symmetric: bool) -> None:
    weight, gram = layer()
    grid = Grid(4, 32, symmetric)
    plain = relative_error(round_to_grid(weight, grid).dequantize() - weight, weight, gram)
    solved = solve(weight, gram, grid, Solver(act_order))  # type: ignore[arg-type]
    error = relative_error(solved.qtensor.dequantize() - weight, weight, gram)
    assert error < 0.75 * plain
    assert (solved.qtensor.g_idx is not None) == (act_order == "group")


def test_one_column_after_another_as_in_the_paper() -> None:
    """Against the algorithm written down naively: a full inverse that loses a row and column each time."""
    weight, gram = layer(columns=32)
    gram = gram.double()
    grid = Grid(4, 32, scale_dtype=torch.float32)
    step = round_to_grid(weight, grid)
    assert step.zero_point is not None
    scale, zero = step.scale[:, 0].double(), step.zero_point[:, 0].double()
    hessian = gram + 0.1 * torch.diag(gram.diagonal())
    inverse, work, out = torch.linalg.inv(hessian), weight.double().clone(), []
    for k in range(32):
        q = ((work[:, k] / scale).round() + zero).clamp(0, 15)
        error = (work[:, k] - (q - zero) * scale) / inverse[k, k]
        work -= error[:, None] * inverse[k]
        inverse = inverse - torch.outer(inverse[:, k], inverse[k]) / inverse[k, k]
        out.append(q)
    solved = solve(weight, gram.float(), grid, Solver("off"))
    agree = (solved.qtensor.qdata.double() == torch.stack(out, 1)).double().mean()
    assert float(agree) > 0.995


def test_damping_does_not_depend_on_scales_that_were_moved() -> None:
    _, gram = layer()
    plain, _ = inverse_factor(gram.double(), 0.1)
    scale = torch.tensor([0.25, 1.0, 4.0, 16.0], dtype=torch.float64).repeat(40)
    moved, _ = inverse_factor(gram.double() / scale / scale[:, None], 0.1)
    assert plain is not None
    assert moved is not None
    assert torch.allclose(moved, plain * scale, rtol=1e-9)


def test_dead_channels_are_rounded_to_nearest() -> None:
    weight, gram = layer()
    gram[:, 7] = gram[7] = 0
    solved = solve(weight, gram, GRID, Solver("static"))
    assert solved.damping == 0.1
    step = solved.qtensor.scale.float()[:, 0]
    assert bool(((solved.qtensor.dequantize()[:, 7] - weight[:, 7]).abs() <= 0.51 * step).all())


def test_damping_grows_until_the_matrix_factors() -> None:
    weight, gram = layer()
    gram[0, 1] = gram[1, 0] = 1.02 * float((gram[0, 0] * gram[1, 1]).sqrt()) + 0.1 * float(
        gram.diagonal().mean()
    )
    solved = solve(weight, gram, GRID)
    assert solved.damping is not None
    assert solved.damping > 0.1


def test_a_hopeless_matrix_falls_back_to_rounding() -> None:
    weight, gram = layer()
    for broken in (torch.zeros_like(gram), torch.full_like(gram, float("nan"))):
        solved = solve(weight, broken, GRID)
        assert solved.damping is None
        assert torch.equal(solved.qtensor.qdata, round_to_grid(weight, GRID).qdata)
