"""GPTQ: 4-bit weights, each rounding error made up for by the columns after it (arXiv:2210.17323)."""

from __future__ import annotations

from dataclasses import replace

import torch

from delivery.qtensor import QTensor
from delivery.quantization.awq import search_shrink
from delivery.quantization.gptq import Solver, solve
from delivery.quantization.inputs import InputGroup
from delivery.quantization.rounding import round_group
from delivery.quantization.scheme import W4, Need, Options, Scheme
from delivery.quantization.work import BlockWork


def needs(_options: Options) -> frozenset[Need]:
    return frozenset({"gram"})


def quantize(work: BlockWork) -> None:
    for group in work.groups:
        if work.active(group):
            if work.known(group):
                _solve_group(work, group)
            else:
                round_group(work, group)


def _solve_group(work: BlockWork, group: InputGroup) -> None:
    """Solve the layers of one input together: they share the Hessian, and rows do not meet."""
    options = work.options
    solver = Solver(options.act_order, options.damping)
    gram = work.statistics[group.key].gram
    assert gram is not None
    by_size: dict[int, list[str]] = {}
    for name in work.active(group):
        by_size.setdefault(work.layers[name].group_size, []).append(name)
    for size, names in by_size.items():
        grid = options.grid(size)
        weight = torch.cat([work.layers[n].weight for n in names])
        clip = options.clip and options.act_order != "group"
        solved = solve(weight, gram, grid, solver, search_shrink(weight, gram, grid) if clip else None)
        layers = ", ".join(work.layers[n].source.name for n in names)
        if solved.damping is None:
            work.notes.append(f"{layers}: the Hessian will not factor, so they are rounded to nearest")
        elif solved.damping > options.damping:
            work.notes.append(f"{layers}: damping {solved.damping:g} was needed to factor the Hessian")
        rows = [work.layers[n].weight.shape[0] for n in names]
        for name, part in zip(names, _split(solved.qtensor, rows), strict=True):
            work.finish(name, part)


def _split(q: QTensor, rows: list[int]) -> list[QTensor]:
    zero_points = [None] * len(rows) if q.zero_point is None else q.zero_point.split(rows)
    parts = zip(q.qdata.split(rows), q.scale.split(rows), zero_points, strict=True)
    return [
        replace(
            q, qdata=values.clone(), scale=scale.clone(), zero_point=None if zero is None else zero.clone()
        )
        for values, scale, zero in parts
    ]


SCHEME = Scheme(
    name="gptq-w4a16",
    summary="4-bit weights; rounding errors are compensated column by column",
    storage=W4,
    needs=needs,
    quantize=quantize,
    formats=("gptq", "compressed-tensors", "awq"),
)
