"""FP8 weights with one scale per 128 × 128 block, activations per token. No calibration."""

from __future__ import annotations

import torch

from delivery.quantization.eight_bit import fp8_per_block
from delivery.quantization.scheme import Scheme, Storage, nothing
from delivery.quantization.work import BlockWork

_DTYPE = torch.float8_e4m3fn


def quantize(work: BlockWork) -> None:
    for group in work.groups:
        for name in work.active(group):
            work.finish(name, fp8_per_block(work.layers[name].weight, _DTYPE))


SCHEME = Scheme(
    name="fp8-block",
    summary="FP8 (e4m3fn) weights per 128 x 128 block; no calibration needed",
    storage=Storage(8, _DTYPE, "block", _DTYPE),
    needs=nothing,
    quantize=quantize,
)
