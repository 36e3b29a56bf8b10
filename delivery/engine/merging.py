"""Joining linear layers that read the same input into one: q, k and v; gate and up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from delivery.model.weights import Linear
from delivery.qtensor import QTensor


def merge(layers: Sequence[Linear]) -> Linear | None:
    """One layer whose outputs are those of `layers`, one after the other; None where they differ in kind.

    Nothing is rounded: the merged weight has exactly the values of its parts.
    """
    weights = [layer.weight for layer in layers]
    if all(isinstance(w, torch.Tensor) for w in weights):
        floats = [w for w in weights if isinstance(w, torch.Tensor)]
        merged: torch.Tensor | QTensor | None = None
        if len({w.dtype for w in floats}) == 1:
            merged = torch.cat(floats)
    elif all(isinstance(w, QTensor) for w in weights):
        merged = _merge_quantized([w for w in weights if isinstance(w, QTensor)])
    else:
        merged = None
    if merged is None:
        return None
    return Linear("+".join(layer.name for layer in layers), merged, _merge_biases(layers))


def _merge_biases(layers: Sequence[Linear]) -> torch.Tensor | None:
    given = [layer.bias for layer in layers if layer.bias is not None]
    if not given:
        return None
    zeros = [given[0].new_zeros(layer.out_features) for layer in layers]
    return torch.cat(
        [z if layer.bias is None else layer.bias for layer, z in zip(layers, zeros, strict=True)]
    )


def _merge_quantized(weights: list[QTensor]) -> QTensor | None:
    first = weights[0]
    if any(w.outliers is not None for w in weights):
        return None
    for other in weights[1:]:
        same = (
            other.bits == first.bits
            and other.qdata.dtype == first.qdata.dtype
            and other.group_size == first.group_size
            and other.act_dtype == first.act_dtype
            and (other.zero_point is None) == (first.zero_point is None)
            and _equal(other.g_idx, first.g_idx)
            and _equal(other.input_scale, first.input_scale)
        )
        if not same:
            return None
    if any(w.block_size is not None for w in weights):
        whole = all(
            w.block_size == first.block_size and w.shape[0] % w.block_size == 0
            for w in weights
            if w.block_size
        )
        if not whole or any(w.block_size is None for w in weights):
            return None
        scales = [w.scale for w in weights]
    else:
        scales = [w.scale.expand(w.shape[0], -1) for w in weights]
    zero_points = [w.zero_point.expand(w.shape[0], -1) for w in weights if w.zero_point is not None]
    return QTensor(
        qdata=torch.cat([w.qdata for w in weights]),
        scale=torch.cat(scales),
        zero_point=torch.cat(zero_points) if zero_points else None,
        group_size=first.group_size,
        bits=first.bits,
        g_idx=first.g_idx,
        input_scale=first.input_scale,
        act_dtype=first.act_dtype,
        block_size=first.block_size,
    )


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
