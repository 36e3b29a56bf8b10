"""FP8 weights per channel, FP8 activations per token with dynamic scales. No calibration."""

from __future__ import annotations

import torch

from delivery.quantization.eight_bit import fp8_per_channel
from delivery.quantization.scheme import Scheme, Storage, nothing
from delivery.quantization.work import BlockWork

_DTYPE = torch.float8_e4m3fn


def quantize(work: BlockWork) -> None:
    for group in work.groups:
        for name in work.active(group):
            work.finish(name, fp8_per_channel(work.layers[name].weight, _DTYPE))


SCHEME = Scheme(
    name="fp8-dynamic",
    summary="FP8 (e4m3fn) weights per channel, activations per token; no calibration needed",
    storage=Storage(8, _DTYPE, "channel", _DTYPE),
    needs=nothing,
    quantize=quantize,
    formats=("compressed-tensors", "smooth_quant"),
)
