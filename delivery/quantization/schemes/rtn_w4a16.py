"""RTN: round to nearest, 4-bit weights per group, activations untouched. Needs no calibration."""

from __future__ import annotations

from delivery.quantization.options import Options
from delivery.quantization.rounding import round_nearest
from delivery.quantization.scheme import W4, Need, Scheme
from delivery.quantization.work import BlockWork


def needs(options: Options) -> frozenset[Need]:
    return frozenset({"gram"}) if options.clip else frozenset()


def quantize(work: BlockWork) -> None:
    for group in work.groups:
        round_nearest(work, group)


SCHEME = Scheme(
    name="rtn-w4a16",
    summary="4-bit weights, rounded to nearest; no calibration needed",
    storage=W4,
    needs=needs,
    quantize=quantize,
    formats=("compressed-tensors", "awq", "gptq"),
)
