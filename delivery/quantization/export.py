"""From a finished block to its checkpoint tensors, in one on-disk format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from delivery.model.load import take_rows
from delivery.qtensor import Outliers, QTensor
from delivery.quantization.driver import BlockResult
from delivery.quantization.eight_bit import fp8_per_block, fp8_per_tensor
from delivery.quantization.plan import Target
from delivery.quantization.work import BlockWork, Layer


def block_tensors(
    result: BlockResult, targets: Sequence[Target], format_module: Any
) -> dict[str, torch.Tensor]:
    """Every new or changed tensor of a block: packed weights, biases, norms, cache scales.

    Fused layers are put together again in their stored order; experts that the source stacks in one tensor
    are written apart, those that stay as they are too where others of the stack do not.
    """
    work = result.work
    out: dict[str, torch.Tensor] = {}
    by_prefix: dict[str, list[Target]] = {}
    for target in targets:
        by_prefix.setdefault(target.stored, []).append(target)
    opened = {t.prefix for t in targets if t.part.expert is not None and t.planned is not None}
    for prefix, parts in by_prefix.items():
        layers = [work.layers[p.name] for p in parts]
        bias = _joined_bias(layers)
        if all(layer.result is not None for layer in layers):
            out.update(format_module.pack(prefix, _joined(layers), bias))
        elif any(layer.changed for layer in layers) or parts[0].prefix in opened:
            out.update(_floats(parts, layers, bias))
    out.update({norm.name: norm.weight for norm in _changed_norms(work)})
    if result.kv:
        at = next(t.prefix for t in targets if t.name == "o_proj").rsplit(".", 1)[0]
        out.update(format_module.pack_kv(at, result.kv["k_scale"], result.kv["v_scale"]))
    return out


def replaced_names(targets: Sequence[Target]) -> set[str]:
    """Source tensors that a quantised checkpoint does not carry over: weights and biases of its layers."""
    names = set()
    for target in targets:
        if target.planned is not None:
            stacked = target.part.expert is not None
            names |= {target.prefix} if stacked else {f"{target.prefix}.weight", f"{target.prefix}.bias"}
    return names


def _joined(layers: list[Layer]) -> QTensor:
    """Parts as one QTensor, rows in their stored order.

    Parts with scales of their own for a whole tensor or for blocks are rounded again under joint ones.
    """
    results = [layer.result for layer in layers if layer.result is not None]
    first = results[0]
    if len(layers) == 1 and layers[0].source.rows is None:
        return first
    order = _stored_order(layers)
    if first.block_size is not None:
        return fp8_per_block(torch.cat([r.dequantize() for r in results])[order], first.qdata.dtype)
    if first.input_scale is not None:
        weight = torch.cat([r.dequantize() for r in results])[order]
        return replace(fp8_per_tensor(weight, 1.0, first.qdata.dtype), input_scale=first.input_scale)
    zero_points = [r.zero_point for r in results if r.zero_point is not None]
    whole = replace(
        first,
        qdata=torch.cat([r.qdata for r in results]),
        scale=torch.cat([r.scale for r in results]),
        zero_point=torch.cat(zero_points) if zero_points else None,
        outliers=_joined_outliers(results),
    )
    joined = take_rows(whole, order)
    assert isinstance(joined, QTensor)
    return joined


def _joined_outliers(results: list[QTensor]) -> Outliers | None:
    apart = [r.outliers for r in results if r.outliers is not None]
    if not apart:
        return None
    starts = torch.tensor([0, *(r.qdata.numel() for r in results)]).cumsum(0).tolist()
    return Outliers(
        torch.cat([o.index + start for o, start in zip(apart, starts, strict=False)]),
        torch.cat([o.values for o in apart]),
        torch.cat([o.scale for o in apart]),
        apart[0].bits,
    )


def _stored_order(layers: list[Layer]) -> torch.Tensor:
    rows = []
    for layer in layers:
        assert layer.source.rows is not None
        rows.append(layer.source.rows)
    return torch.cat(rows).argsort()


def _joined_bias(layers: list[Layer]) -> torch.Tensor | None:
    biases = [layer.bias for layer in layers]
    if any(b is None for b in biases):
        return None
    joined = torch.cat([b for b in biases if b is not None])
    return joined if layers[0].source.rows is None else joined[_stored_order(layers)]


def _floats(parts: list[Target], layers: list[Layer], bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    weight = torch.cat([layer.stored_weight() for layer in layers])
    if layers[0].source.rows is not None:
        weight = weight[_stored_order(layers)]
    tensors = {f"{parts[0].stored}.weight": weight}
    return tensors if bias is None else {**tensors, f"{parts[0].stored}.bias": bias}


def _changed_norms(work: BlockWork) -> list[Any]:
    return [norm for name, norm in work.norms.items() if norm is not work.source_norms[name]]
