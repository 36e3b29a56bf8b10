"""GPTQ's inner loop: round the columns of one block in turn, each error spread over those after it.

Frantar et al. 2022, arXiv:2210.17323, algorithm 1, inside a block of columns. Rows are independent,
so the GPU backend holds a tile of rows in registers while it walks along the columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.targets import why_not_cpu, why_not_triton


def reference(
    weight: torch.Tensor,
    factor: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    group: torch.Tensor,
    low: int,
    high: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, B] → (q uint8 or int8 [N, B], error [N, B] in weight's dtype).

    factor: [B, B], this block of the upper Cholesky factor of the inverse Hessian. scale, zero_point:
    [N, S], of which column b uses entry group[b] (int64 [B]). low, high: bounds of q, −128 to 255.
    error: (w − Q(w)) / factor[b, b] of each column at its turn, for the columns after this block.
    """
    work = weight.clone()
    out = torch.empty(weight.shape, dtype=torch.uint8 if low >= 0 else torch.int8, device=weight.device)
    errors = torch.empty_like(weight)
    steps, shifts = scale.to(weight.dtype)[:, group], zero_point.to(weight.dtype)[:, group]
    for b in range(weight.shape[1]):
        values, step, shift = work[:, b], steps[:, b], shifts[:, b]
        rounded = ((values / step).round() + shift).clamp(low, high)
        error = (values - (rounded - shift) * step) / factor[b, b]
        out[:, b] = rounded.to(out.dtype)
        errors[:, b] = error
        work[:, b + 1 :] -= error[:, None] * factor[b, b + 1 :]
    return out, errors


def _left_looking(
    weight: torch.Tensor,
    factor: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    group: torch.Tensor,
    low: int,
    high: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with columns stored as rows: a column takes all errors before it in one product.

    Every value is written once and errors are read in order, where the reference writes half the block
    for each column.
    """
    columns = weight.t().contiguous()
    out = torch.empty(columns.shape, dtype=torch.uint8 if low >= 0 else torch.int8, device=weight.device)
    errors = torch.empty_like(columns)
    steps = scale.to(weight.dtype).t().contiguous()
    shifts = zero_point.to(weight.dtype).t().contiguous()
    pivots = factor.diagonal().tolist()
    for b, g in enumerate(group.tolist()):
        step, shift = steps[g], shifts[g]
        values = torch.addmv(columns[b], errors[:b].t(), factor[:b, b], alpha=-1) if b else columns[0]
        rounded = (values / step).round_().add_(shift).clamp_(low, high)
        out[b] = rounded
        torch.div(values - rounded.sub_(shift).mul_(step), pivots[b], out=errors[b])
    return out.t(), errors.t()


def _triton(
    weight: torch.Tensor,
    factor: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    group: torch.Tensor,
    low: int,
    high: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    from delivery.kernels.gpu.gptq_columns import gptq_columns

    return gptq_columns(weight, factor, scale, zero_point, group, low, high)


def _why_not(weight: torch.Tensor, *_args: object, **_kwargs: object) -> str | None:
    if weight.dtype != torch.float32:
        return f"weights are {weight.dtype}, the kernel works in float32"
    if weight.shape[1] > 128:
        return f"a block of {weight.shape[1]} columns is wider than 128"
    return why_not_triton(weight)


def _cases() -> Iterator[Case]:
    for name, rows, columns, groups, low, high in (
        ("asymmetric", 40, 128, 1, 0, 15),
        ("symmetric", 33, 64, 2, -8, 7),
        ("odd", 7, 24, 3, 0, 15),
    ):

        def make(
            device: torch.device,
            dtype: torch.dtype,
            seed: int,
            n: int = rows,
            b: int = columns,
            s: int = groups,
            lo: int = low,
            hi: int = high,
        ) -> tuple[object, ...]:
            random = torch.Generator("cpu").manual_seed(seed)
            weight = torch.randn(n, b, generator=random, dtype=torch.float64)
            mixed = torch.randn(4 * b, b, generator=random, dtype=torch.float64)
            hessian = mixed.T @ mixed / b + torch.eye(b, dtype=torch.float64)
            factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
            scale = 0.3 + 0.1 * torch.rand(n, s, generator=random, dtype=torch.float64)
            zero_point = torch.full((n, s), float((hi + lo + 1) // 2), dtype=torch.float64)
            group = torch.arange(b) * s // b
            floats = (t.to(device, dtype) for t in (weight, factor, scale, zero_point))
            return *floats, group.to(device), lo, hi

        # One value at a rounding boundary may fall to either side and move the rest of its row.
        yield Case(name, make, {torch.float32: 2e-2})


OP = Op(
    name="gptq_columns",
    reference=reference,
    backends={"cpu": Backend(_left_looking, why_not_cpu), "triton": Backend(_triton, _why_not)},
    cases=_cases,
)
