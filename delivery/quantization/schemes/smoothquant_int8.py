"""SmoothQuant: int8 weights and activations after outliers moved into the weights (arXiv:2211.10438)."""

from __future__ import annotations

import torch

from delivery.quantization.eight_bit import int8_per_channel
from delivery.quantization.options import Options
from delivery.quantization.scheme import Need, Scheme, Storage
from delivery.quantization.smoothing import smooth_block
from delivery.quantization.work import BlockWork


def needs(options: Options) -> frozenset[Need]:
    return frozenset({"absmax", "gram", "sample"}) if options.search_scale else frozenset({"absmax"})


def quantize(work: BlockWork) -> None:
    smooth_block(work, torch.int8)
    for group in work.groups:
        for name in work.active(group):
            work.finish(name, int8_per_channel(work.layers[name].weight))


SCHEME = Scheme(
    name="smoothquant-int8",
    summary="int8 weights per channel, int8 activations per token; outliers smoothed first",
    storage=Storage(8, torch.int8, "channel", torch.int8),
    needs=needs,
    quantize=quantize,
    formats=("smooth_quant", "compressed-tensors"),
)
