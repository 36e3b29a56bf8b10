"""GPTQ: round columns in turn and compensate in the rest (Frantar et al., arXiv:2210.17323).

The Hessian of a layer's squared output error is the Gram matrix of its inputs, so GPTQ and AWQ share
one accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from delivery.kernels.gptq_columns import OP as GPTQ_COLUMNS
from delivery.qtensor import QTensor
from delivery.quantization.grid import Grid, grouped, parameters, round_to_grid
from delivery.quantization.statistics import tf32

ActOrder = Literal["off", "static", "group"]

_BLOCK = 128
_DAMPING_STEPS = 5


@dataclass(frozen=True, slots=True)
class Solver:
    """How GPTQ works through the columns.

    act_order: "static" takes columns by falling activation, with scales formed beforehand for groups
        in their stored order, so no g_idx is needed; "group" forms groups along that order and stores
        g_idx; "off" takes columns in stored order.
    damping: share of its own diagonal that is added to the Hessian; ten times more, up to five times,
        when it will not factor. The paper adds a share of the mean, which leaves quiet channels with
        nothing but damping and loud ones with none; a share of each channel's own energy shrinks all
        correlations alike and does not depend on the scales that AWQ moved. A few thousand tokens know
        correlations poorly, and a tenth keeps the solver from fitting their noise.
    """

    act_order: ActOrder = "static"
    damping: float = 0.1


_DEFAULT = Solver()


@dataclass(frozen=True, slots=True)
class Solved:
    """qtensor, and the damping needed; None if none helped and the layer was rounded to nearest."""

    qtensor: QTensor
    damping: float | None


def solve(
    weight: torch.Tensor,
    gram: torch.Tensor,
    grid: Grid,
    solver: Solver = _DEFAULT,
    shrink: torch.Tensor | None = None,
) -> Solved:
    """GPTQ of weight [N, K] with the Gram matrix [K, K] of its inputs; nothing is changed in place.

    shrink: [N, K/g], narrower ranges for groups in their stored order (not with act_order="group").
    Channels without activation are rounded to nearest: nothing is known about them.
    """
    order = torch.arange(weight.shape[1], device=weight.device)
    if solver.act_order != "off":
        order = gram.diagonal().argsort(descending=True, stable=True)
    factor, damping = inverse_factor(gram[order][:, order], solver.damping)
    if factor is None:
        return Solved(round_to_grid(weight, grid, shrink), None)
    work = weight.float()[:, order].contiguous()
    if solver.act_order == "group":
        return Solved(_grouped_on_the_way(work, factor, grid, order), damping)
    scale, zero_point = parameters(grouped(weight, grid), grid, shrink)
    return Solved(_with_scales(work, factor, grid, order, scale, zero_point), damping)


def inverse_factor(hessian: torch.Tensor, damping: float) -> tuple[torch.Tensor | None, float | None]:
    """Upper triangular U with Uᵀ U = (H + δ diag H)⁻¹, and the share δ that it took.

    (None, None) when the matrix will not factor. U is the inverse of the upper factor R of
    H = R Rᵀ, which is the lower Cholesky factor of H turned by half a turn: one factorisation and
    one triangular inverse instead of the usual two factorisations and a full inverse.
    """
    diagonal = hessian.diagonal().clone()
    alive = diagonal > 0
    if not bool(torch.isfinite(diagonal).all()) or not bool(alive.any()):
        return None, None
    mean = diagonal[alive].mean()
    size = hessian.shape[0]
    for step in range(_DAMPING_STEPS):
        share = damping * 10.0**step
        damped = hessian.flip(0, 1)
        damped.diagonal().add_(torch.where(alive, share * diagonal, mean).flip(0))
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if int(failed) == 0:
            upper = lower.flip(0, 1)
            del lower
            eye = torch.eye(size, device=hessian.device, dtype=hessian.dtype)
            inverse = torch.linalg.solve_triangular(upper, eye, upper=True)
            if bool(torch.isfinite(inverse).all()):
                return inverse, share
    return None, None


def _with_scales(
    work: torch.Tensor,
    factor: torch.Tensor,
    grid: Grid,
    order: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
) -> QTensor:
    columns = work.shape[1]
    qdata = torch.empty(work.shape, dtype=torch.int8 if grid.symmetric else torch.uint8, device=work.device)
    shift = torch.zeros_like(scale, dtype=torch.float32) if zero_point is None else zero_point
    group = order // grid.width(columns)
    for start in range(0, columns, _BLOCK):
        end = min(start + _BLOCK, columns)
        qdata[:, start:end] = _round_block(work, factor, start, end, scale, shift, group[start:end], grid)
    return _assembled(qdata[:, order.argsort()], scale, zero_point, grid, None)


def _grouped_on_the_way(work: torch.Tensor, factor: torch.Tensor, grid: Grid, order: torch.Tensor) -> QTensor:
    columns = work.shape[1]
    width = grid.width(columns)
    qdata = torch.empty(work.shape, dtype=torch.int8 if grid.symmetric else torch.uint8, device=work.device)
    scales, zeros = [], []
    for start in range(0, columns, width):
        end = start + width
        scale, zero_point = parameters(work[:, None, start:end], grid)
        shift = torch.zeros_like(scale, dtype=torch.float32) if zero_point is None else zero_point
        for left in range(start, end, _BLOCK):
            right = min(left + _BLOCK, end)
            one = torch.zeros(right - left, dtype=torch.int64, device=work.device)
            qdata[:, left:right] = _round_block(work, factor, left, right, scale, shift, one, grid)
        scales.append(scale)
        if zero_point is not None:
            zeros.append(zero_point)
    place = order.argsort()
    g_idx = (place // width).to(torch.int32) if grid.group_size != -1 else None
    zero_point = torch.cat(zeros, 1) if zeros else None
    return _assembled(qdata[:, place], torch.cat(scales, 1), zero_point, grid, g_idx)


def _round_block(
    work: torch.Tensor,
    factor: torch.Tensor,
    start: int,
    end: int,
    scale: torch.Tensor,
    shift: torch.Tensor,
    group: torch.Tensor,
    grid: Grid,
) -> torch.Tensor:
    """Round columns start..end of `work` and take their error out of the columns after them, in place."""
    low, high = grid.bounds
    q, error = GPTQ_COLUMNS(work[:, start:end], factor[start:end, start:end], scale, shift, group, low, high)
    with tf32(work.device):
        work[:, end:].addmm_(error, factor[start:end, end:], alpha=-1)
    return q  # type: ignore[no-any-return]


def _assembled(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    grid: Grid,
    g_idx: torch.Tensor | None,
) -> QTensor:
    return QTensor(
        qdata=qdata.contiguous(),
        scale=scale.contiguous(),
        zero_point=None if zero_point is None else zero_point.to(torch.uint8).contiguous(),
        group_size=grid.group_size,
        bits=grid.bits,
        g_idx=g_idx,
    )
