"""GPTQ: 4-bit weights, each rounding error compensated in the columns after it (arXiv:2210.17323)."""

from __future__ import annotations

from delivery.quantization.options import Options
from delivery.quantization.rounding import compensate_group
from delivery.quantization.scheme import W4, Need, Scheme
from delivery.quantization.work import BlockWork


def needs(_options: Options) -> frozenset[Need]:
    return frozenset({"gram"})


def quantize(work: BlockWork) -> None:
    for group in work.groups:
        compensate_group(work, group)


SCHEME = Scheme(
    name="gptq-w4a16",
    summary="4-bit weights; rounding errors are compensated column by column",
    storage=W4,
    needs=needs,
    quantize=quantize,
    formats=("gptq", "compressed-tensors", "awq"),
    compensates=lambda _options: True,
)
