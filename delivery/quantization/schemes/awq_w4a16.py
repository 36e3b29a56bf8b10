"""AWQ: 4-bit weights after a search for the input channels to protect (arXiv:2306.00978)."""

from __future__ import annotations

from delivery.quantization.awq import Search, search_scale
from delivery.quantization.inputs import InputGroup
from delivery.quantization.options import Options
from delivery.quantization.rounding import round_group
from delivery.quantization.scheme import W4, Need, Scheme, as_asked
from delivery.quantization.work import BlockWork


def needs(_options: Options) -> frozenset[Need]:
    return frozenset({"gram", "sensitivity"})


def protect(work: BlockWork, group: InputGroup) -> None:
    """Search the scale of a group's input and move it into what feeds the group."""
    if not work.movable(group) or not work.known(group):
        return
    gram = work.statistics[group.key].gram
    assert gram is not None
    widths = [work.layers[n].group_size for n in work.active(group)]
    grid = work.options.grid(widths[0])
    found = search_scale(
        work.joined(group),
        gram,
        grid,
        Search(points=work.options.points, duo=work.options.duo),
        tie=lambda scale: work.tied(group, scale),
        matter=work.matter(group),
    )
    if found.loss < found.plain_loss:
        work.move(group, found.scale)


def quantize(work: BlockWork) -> None:
    # Layers that feed others come last: what they take must be in their weights before their own search.
    for group in sorted(work.groups, key=lambda g: g.norm is not None):
        protect(work, group)
    for group in work.groups:
        round_group(work, group)


SCHEME = Scheme(
    name="awq-w4a16",
    summary="4-bit weights; channels that matter are scaled up first (activation-aware search)",
    storage=W4,
    needs=needs,
    quantize=quantize,
    formats=("awq", "compressed-tensors", "gptq"),
    compensates=as_asked,
)
