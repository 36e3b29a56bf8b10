"""int8 weights per channel, activations untouched. No calibration."""

from __future__ import annotations

import torch

from delivery.quantization.eight_bit import int8_per_channel
from delivery.quantization.scheme import Scheme, Storage, nothing
from delivery.quantization.work import BlockWork


def quantize(work: BlockWork) -> None:
    for group in work.groups:
        for name in work.active(group):
            work.finish(name, int8_per_channel(work.layers[name].weight, act_dtype=None))


SCHEME = Scheme(
    name="w8a16",
    summary="int8 weights per channel, floating-point activations; no calibration needed",
    storage=Storage(8, torch.int8, "channel"),
    needs=nothing,
    quantize=quantize,
)
