"""The last step of every grouped scheme: clip where asked, round, finish the layer."""

from __future__ import annotations

from delivery.quantization.awq import search_shrink
from delivery.quantization.grid import round_to_grid
from delivery.quantization.inputs import InputGroup
from delivery.quantization.work import BlockWork


def round_group(work: BlockWork, group: InputGroup) -> None:
    """Round the active layers of a group to their 4-bit grids; with `options.clip` narrow ranges first."""
    statistics = work.statistics.get(group.key)
    gram = None if statistics is None else statistics.gram
    clip = work.options.clip and gram is not None and work.known(group)
    for name in work.active(group):
        layer = work.layers[name]
        grid = work.options.grid(layer.group_size)
        shrink = None
        if clip:
            assert gram is not None
            shrink = search_shrink(layer.weight, gram, grid)
        work.finish(name, round_to_grid(layer.weight, grid, shrink))
