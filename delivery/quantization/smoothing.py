"""Smooth a whole block before it is rounded: what the SmoothQuant schemes share."""

from __future__ import annotations

import torch

from delivery.quantization.inputs import InputGroup
from delivery.quantization.smooth import search_alpha, smooth_scale
from delivery.quantization.work import BlockWork


def smooth_block(work: BlockWork, dtype: torch.dtype) -> None:
    """Move outliers from the inputs into the weights: norm → linear layers, up → down, v → o.

    dtype: what activations are rounded to, for `--search-scale`. Layers that feed others come last,
    so that what they take is in their weights before their own input is scaled.
    """
    for group in sorted(work.groups, key=lambda g: g.norm is not None):
        if work.movable(group, shared_heads=False) and work.known(group):
            work.move(group, _scale(work, group, dtype))


def _scale(work: BlockWork, group: InputGroup, dtype: torch.dtype) -> torch.Tensor:
    statistics = work.statistics[group.key]
    weight = work.joined(group)
    if work.options.search_scale and statistics.gram is not None:
        sample = work.samples[group.key]
        return search_alpha(weight, statistics.gram, statistics.absmax, sample, dtype).scale
    return smooth_scale(statistics.absmax, weight.abs().amax(0), work.options.alpha)
