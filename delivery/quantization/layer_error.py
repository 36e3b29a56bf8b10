"""The error of every quantised layer, as a row of a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from delivery.qtensor import QTensor
from delivery.quantization.measure import output_error, relative_error, row_losses, sqnr_db
from delivery.quantization.running import simulate
from delivery.quantization.work import BlockWork, Layer


@dataclass(frozen=True, slots=True)
class LayerError:
    """The quantisation error of one linear layer.

    name: prefix in the checkpoint. canonical: name within the block (several may share a prefix where
    the file fuses them). relative: ‖error‖ / ‖output‖ where activations were seen, else of the weights;
    `basis` says which. tokens: that reached it; 0 without data.
    """

    layer: int
    name: str
    canonical: str
    scheme: str
    rows: int
    columns: int
    group_size: int
    bits_per_weight: float
    relative_error: float
    sqnr_db: float
    basis: str
    tokens: int

    def row(self) -> dict[str, object]:
        """Plain JSON values; an error of zero has an SQNR of 999 dB, since JSON knows no infinity."""
        return {**asdict(self), "sqnr_db": min(self.sqnr_db, 999.0)}


def layer_error(work: BlockWork, name: str, scheme: str) -> LayerError:
    """Judge a finished layer on what the work knows of its inputs."""
    layer = work.layers[name]
    qtensor = layer.result
    assert qtensor is not None
    key = next(g.key for g in work.groups if name in g.linears)
    found = work.statistics.get(key)
    tokens = 0 if found is None else found.tokens
    gram = found.gram if found is not None and tokens else None
    sample = work.samples.get(key)
    if gram is not None and qtensor.act_dtype is None:
        relative, basis = _over_gram(layer, qtensor, gram), "all tokens"
    elif sample is not None and sample.shape[0]:
        relative, basis = _over_sample(layer, qtensor, sample), f"{sample.shape[0]} tokens"
    else:
        error = qtensor.dequantize() - layer.weight
        relative, basis = relative_error(error, layer.weight, None), "weights"
    rows, columns = qtensor.shape
    return LayerError(
        layer=work.layer,
        name=layer.source.name,
        canonical=name,
        scheme=scheme,
        rows=rows,
        columns=columns,
        group_size=qtensor.group_size,
        bits_per_weight=round(qtensor.bits_per_weight(), 4),
        relative_error=relative,
        sqnr_db=sqnr_db(relative),
        basis=basis,
        tokens=tokens,
    )


def _over_gram(layer: Layer, qtensor: QTensor, gram: torch.Tensor) -> float:
    # Rows that were divided for a later layer count as much as they do in the source model.
    units = 1.0 if layer.rows is None else layer.rows.square()
    lost = (row_losses(qtensor.dequantize() - layer.weight, gram) * units).sum(dtype=torch.float64)
    total = (row_losses(layer.weight, gram) * units).sum(dtype=torch.float64)
    return _ratio(float(lost), float(total))


def _over_sample(layer: Layer, qtensor: QTensor, sample: torch.Tensor) -> float:
    x = sample.float()
    units = 1.0 if layer.rows is None else layer.rows
    reference = (x @ layer.weight.T) * units
    return _ratio(*output_error(simulate(qtensor, None, torch.float32)(x) * units, reference))


def _ratio(lost: float, total: float) -> float:
    if total == 0:
        return 0.0 if lost == 0 else float("inf")
    return float((lost / total) ** 0.5)
