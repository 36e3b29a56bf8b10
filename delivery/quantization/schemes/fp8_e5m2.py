"""FP8 e5m2: more range and one bit less of precision than e4m3fn, for weights and activations."""

from __future__ import annotations

import torch

from delivery.quantization.eight_bit import fp8_per_channel
from delivery.quantization.scheme import Scheme, Storage, nothing
from delivery.quantization.work import BlockWork

_DTYPE = torch.float8_e5m2


def quantize(work: BlockWork) -> None:
    for group in work.groups:
        for name in work.active(group):
            work.finish(name, fp8_per_channel(work.layers[name].weight, _DTYPE))


SCHEME = Scheme(
    name="fp8-e5m2",
    summary="FP8 (e5m2) weights per channel, activations per token; no calibration needed",
    storage=Storage(8, _DTYPE, "channel", _DTYPE),
    needs=nothing,
    quantize=quantize,
    formats=("smooth_quant",),
)
