"""SmoothQuant with FP8 (e4m3fn) weights and activations (arXiv:2211.10438)."""

from __future__ import annotations

import torch

from delivery.quantization.eight_bit import fp8_per_channel
from delivery.quantization.options import Options
from delivery.quantization.scheme import Need, Scheme, Storage
from delivery.quantization.smoothing import smooth_block
from delivery.quantization.work import BlockWork

_DTYPE = torch.float8_e4m3fn


def needs(options: Options) -> frozenset[Need]:
    return frozenset({"absmax", "gram", "sample"}) if options.search_scale else frozenset({"absmax"})


def quantize(work: BlockWork) -> None:
    smooth_block(work, _DTYPE)
    for group in work.groups:
        for name in work.active(group):
            work.finish(name, fp8_per_channel(work.layers[name].weight, _DTYPE))


SCHEME = Scheme(
    name="smoothquant-fp8",
    summary="FP8 weights per channel, FP8 activations per token; outliers smoothed first",
    storage=Storage(8, _DTYPE, "channel", _DTYPE),
    needs=needs,
    quantize=quantize,
    formats=("smooth_quant", "compressed-tensors"),
)
