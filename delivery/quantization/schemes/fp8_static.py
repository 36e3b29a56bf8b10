"""FP8 weights per tensor and a calibrated activation scale per layer: the fastest FP8 form to serve."""

from __future__ import annotations

import torch

from delivery.quantization.eight_bit import fp8_per_tensor
from delivery.quantization.inputs import InputGroup
from delivery.quantization.options import Options
from delivery.quantization.scheme import Need, Scheme, Storage
from delivery.quantization.work import BlockWork

_DTYPE = torch.float8_e4m3fn


def needs(_options: Options) -> frozenset[Need]:
    return frozenset({"absmax"})


def quantize(work: BlockWork) -> None:
    for group in work.groups:
        absmax = _absmax(work, group)
        for name in work.active(group):
            work.finish(name, fp8_per_tensor(work.layers[name].weight, absmax, _DTYPE))


def _absmax(work: BlockWork, group: InputGroup) -> float:
    """The largest input of a group; for an expert that no token reached, that of the other experts."""
    found = work.statistics.get(group.key)
    if found is not None and found.tokens:
        return float(found.absmax.max())
    kind = group.key.rsplit(".", 1)[-1]
    fellows = [s for key, s in work.statistics.items() if key.rsplit(".", 1)[-1] == kind and s.tokens]
    if work.active(group):
        name = work.layers[group.key].source.name
        work.notes.append(
            f"{name}: no calibration token reached it; its input scale is that of other experts"
        )
    return max((float(s.absmax.max()) for s in fellows), default=1.0)


SCHEME = Scheme(
    name="fp8-static",
    summary="FP8 (e4m3fn) weights and activations, one calibrated scale each per layer",
    storage=Storage(8, _DTYPE, "tensor", _DTYPE, static=True),
    needs=needs,
    quantize=quantize,
)
