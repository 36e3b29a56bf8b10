"""The last step of every grouped scheme: keep outliers and clip where asked, round, finish the layer."""

from __future__ import annotations

from dataclasses import replace

from delivery.quantization.awq import search_shrink
from delivery.quantization.grid import round_to_grid
from delivery.quantization.inputs import InputGroup
from delivery.quantization.outliers import split_outliers
from delivery.quantization.work import BlockWork


def round_group(work: BlockWork, group: InputGroup) -> None:
    """Round the active layers of a group to their 4-bit grids.

    With `options.outliers`, the weights that matter most are kept apart first; with `options.clip`,
    ranges are narrowed.
    """
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
