"""GPTQ: 4-bit weights, each rounding error made up for by the columns after it (arXiv:2210.17323)."""

from __future__ import annotations

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
    options = work.options
    solver = Solver(options.act_order, options.damping)
    gram = work.statistics[group.key].gram
    assert gram is not None
    for name in work.active(group):
        layer = work.layers[name]
        grid = options.grid(layer.group_size)
        clip = options.clip and options.act_order != "group"
        shrink = search_shrink(layer.weight, gram, grid) if clip else None
        solved = solve(layer.weight, gram, grid, solver, shrink)
        if solved.damping is None:
            work.notes.append(
                f"{layer.source.name}: its Hessian will not factor, so it is rounded to nearest"
            )
        elif solved.damping > options.damping:
            work.notes.append(
                f"{layer.source.name}: damping {solved.damping:g} was needed to factor its Hessian"
            )
        work.finish(name, solved.qtensor)


SCHEME = Scheme(
    name="gptq-w4a16",
    summary="4-bit weights; rounding errors are compensated column by column",
    storage=W4,
    needs=needs,
    quantize=quantize,
    formats=("gptq", "compressed-tensors", "awq"),
)
