"""SmoothQuant, then 4-bit weights: the smoothed model rounded per group, activations untouched."""

from __future__ import annotations

import torch

from delivery.quantization.options import Options
from delivery.quantization.rounding import round_group
from delivery.quantization.scheme import W4, Need, Scheme, as_asked
from delivery.quantization.smoothing import smooth_block
from delivery.quantization.work import BlockWork


def needs(options: Options) -> frozenset[Need]:
    wanted: set[Need] = {"absmax"}
    if options.search_scale:
        wanted |= {"gram", "sample"}
    if options.clip or options.rounding == "gptq":
        wanted.add("gram")
    return frozenset(wanted)


def quantize(work: BlockWork) -> None:
    smooth_block(work, torch.int8)
    for group in work.groups:
        round_group(work, group)


SCHEME = Scheme(
    name="smoothquant-w4a16",
    summary="4-bit weights of a smoothed model",
    storage=W4,
    needs=needs,
    quantize=quantize,
    formats=("compressed-tensors", "awq", "gptq"),
    compensates=as_asked,
)
