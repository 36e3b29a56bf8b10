"""A block in the calibration dtype, float or with its quantised layers simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from delivery.model.weights import BlockWeights, Linear, fake_quantize
from delivery.qtensor import QTensor
from delivery.quantization.work import BlockWork


@dataclass(frozen=True, slots=True)
class Simulated:
    """A quantised linear layer whose weight was expanded once: the values of the real one, at float speed.

    weight: [N, K] in the running dtype. activation: dtype that inputs are rounded to, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: torch.dtype | None = None
    input_scale: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] → [T, N]."""
        if self.activation is not None:
            x = fake_quantize(x, self.activation, self.input_scale)
        return functional.linear(x, self.weight, self.bias)


def simulate(qtensor: QTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Simulated:
    """The layer that a QTensor represents, running in `dtype`."""
    weight = qtensor.dequantize(dtype)
    cast = None if bias is None else bias.to(dtype)
    return Simulated(weight, cast, qtensor.act_dtype, qtensor.input_scale)


def in_dtype(weights: BlockWeights, dtype: torch.dtype) -> BlockWeights:
    """A float block with its linear layers and other tensors in `dtype`; norms work in any."""
    linears = {}
    for name, linear in weights.linears.items():
        assert isinstance(linear, Linear)
        assert isinstance(linear.weight, torch.Tensor)
        bias = None if linear.bias is None else linear.bias.to(dtype)
        linears[name] = replace(linear, weight=linear.weight.to(dtype), bias=bias)
    tensors = {name: tensor.to(dtype) for name, tensor in weights.tensors.items()}
    return replace(weights.with_linears(linears), tensors=tensors)


def quantized_block(weights: BlockWeights, work: BlockWork, dtype: torch.dtype) -> BlockWeights:
    """The block that `work` ended with: finished layers simulated, the others float, norms divided."""
    linears: dict[str, Linear | Simulated] = {}
    for name, layer in work.layers.items():
        if layer.result is not None:
            linears[name] = simulate(layer.result, layer.bias, dtype)
        else:
            bias = None if layer.bias is None else layer.bias.to(dtype)
            linears[name] = replace(layer.source, weight=layer.stored_weight().to(dtype), bias=bias)
    tensors = {name: tensor.to(dtype) for name, tensor in weights.tensors.items()}
    return replace(weights.with_linears(linears), norms={**weights.norms, **work.norms}, tensors=tensors)
