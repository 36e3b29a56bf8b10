"""The last step of every grouped scheme: clip and keep outliers where asked, round, finish the layers."""

from __future__ import annotations

from dataclasses import replace

import torch

from delivery.qtensor import QTensor
from delivery.quantization.awq import search_shrink
from delivery.quantization.gptq import Solver, solve
from delivery.quantization.grid import round_to_grid
from delivery.quantization.inputs import InputGroup
from delivery.quantization.outliers import split_outliers
from delivery.quantization.work import BlockWork


def round_group(work: BlockWork, group: InputGroup) -> None:
    """Round the active layers of a group to their 4-bit grids.

    With `options.rounding` "gptq" errors are compensated, where activations are known; else with
    `options.outliers` the weights that matter most are kept apart. With `options.clip`, ranges are
    narrowed first.
    """
    if work.options.rounding == "gptq":
        compensate_group(work, group)
    else:
        round_nearest(work, group)


def compensate_group(work: BlockWork, group: InputGroup) -> None:
    """Round the active layers of a group as GPTQ does; to nearest where too few tokens reached it.

    The layers of one input share the Hessian, and rows do not meet, so they are solved together.
    """
    names_here = work.active(group)
    if not names_here:
        return
    gram = work.statistics[group.key].gram if work.known(group) else None
    if gram is None:
        round_nearest(work, group)
        return
    options = work.options
    solver = Solver(options.act_order, options.damping)
    by_size: dict[int, list[str]] = {}
    for name in names_here:
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


def round_nearest(work: BlockWork, group: InputGroup) -> None:
    """Round each weight of a group's active layers by itself, outliers apart, ranges narrowed where asked."""
    statistics = work.statistics.get(group.key)
    gram = None if statistics is None else statistics.gram
    clip = work.options.clip and gram is not None and work.known(group)
    for name in work.active(group):
        layer = work.layers[name]
        grid = work.options.grid(layer.group_size)
        weight, outliers, shrink = layer.weight, None, None
        if work.options.outliers:
            importance = None if statistics is None or not statistics.tokens else statistics.l2()
            share = work.options.outliers
            weight, outliers = split_outliers(weight, importance, share, grid.scale_dtype)
        if clip:
            assert gram is not None
            shrink = search_shrink(weight, gram, grid)
        work.finish(name, replace(round_to_grid(weight, grid, shrink), outliers=outliers))


def _split(q: QTensor, rows: list[int]) -> list[QTensor]:
    zero_points = [None] * len(rows) if q.zero_point is None else q.zero_point.split(rows)
    parts = zip(q.qdata.split(rows), q.scale.split(rows), zero_points, strict=True)
    return [
        replace(
            q, qdata=values.clone(), scale=scale.clone(), zero_point=None if zero is None else zero.clone()
        )
        for values, scale, zero in parts
    ]
