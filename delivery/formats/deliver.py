"""The bundled engine's own format: what the others have no place for, outliers above all.

`X.weight_packed` int32 [N, ceil(K·bits/32)], sequential along K, storing q + 2^(bits−1) where there is no
zero point; `X.weight_scale` [N, K/g]; `X.weight_zero_point` uint8 [N, K/g]; `X.weight_g_idx` int32 [K];
`X.outlier_index` int64 [M] (row · K + column), `X.outlier_value` int8 [M], `X.outlier_scale` [N].
`quantization_config.layers` maps a prefix to its bits, group size and number of input features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from delivery.formats._bits import PACKABLE, pack_last, signed, unpack_last, unsigned
from delivery.formats._checks import (
    Get,
    Has,
    Layers,
    beside,
    expect_shape,
    first_reason,
    plain,
    quantised,
    read,
    read_scale,
    short,
    wrong,
)
from delivery.qtensor import Outliers, QTensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def pack(prefix: str, q: QTensor, bias: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The stored tensors of one layer; `bias` and the dtype of the scales are kept."""
    tensors = {"weight_packed": pack_last(unsigned(q), q.bits), "weight_scale": q.scale}
    if q.zero_point is not None:
        tensors["weight_zero_point"] = q.zero_point
    if q.g_idx is not None:
        tensors["weight_g_idx"] = q.g_idx
    if q.outliers is not None:
        tensors["outlier_index"] = q.outliers.index
        tensors["outlier_value"] = q.outliers.values
        tensors["outlier_scale"] = q.outliers.scale
    if bias is not None:
        tensors["bias"] = bias
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def unpack(prefix: str, get: Get, has: Has, quantization_config: Mapping[str, Any]) -> QTensor:
    """One layer as a QTensor. Raises DataError `quantised-tensor-missing`, `quantised-tensor-wrong`."""
    entry = (quantization_config.get("layers") or {}).get(prefix)
    if not isinstance(entry, Mapping) or entry.get("bits") not in PACKABLE:
        raise wrong(f"{prefix}.weight_packed", "the config's list of layers says nothing usable of it")
    bits, columns, size = (int(entry[key]) for key in ("bits", "columns", "group_size"))
    words = read(get, has, f"{prefix}.weight_packed", (torch.int32,), 2)
    rows = words.shape[0]
    expect_shape(f"{prefix}.weight_packed", words, (rows, -(-columns * bits // 32)))
    scale = read_scale(get, has, f"{prefix}.weight_scale")
    groups = 1 if size == -1 else columns // size
    expect_shape(f"{prefix}.weight_scale", scale, (rows, groups))
    qdata, zero_point, g_idx = unpack_last(words, bits, columns), None, None
    if has(f"{prefix}.weight_zero_point"):
        zero_point = read(get, has, f"{prefix}.weight_zero_point", (torch.uint8,), 2)
        expect_shape(f"{prefix}.weight_zero_point", zero_point, (rows, groups))
    if has(f"{prefix}.weight_g_idx"):
        g_idx = read(get, has, f"{prefix}.weight_g_idx", (torch.int32,), 1)
        expect_shape(f"{prefix}.weight_g_idx", g_idx, (columns,))
        if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
            raise wrong(f"{prefix}.weight_g_idx", f"it leaves the groups 0 to {groups - 1}")
    return QTensor(
        qdata=qdata if zero_point is not None else signed(qdata, bits),
        scale=scale,
        zero_point=zero_point,
        group_size=size,
        bits=bits,
        g_idx=g_idx,
        outliers=_outliers(prefix, get, has, rows, columns),
    )


def is_quantized(prefix: str, has: Has, quantization_config: Mapping[str, Any]) -> bool:
    return has(f"{prefix}.weight_packed")


def quantization_config(layers: Layers, kv: str | None = None) -> dict[str, Any]:
    """The config's entry."""
    return {
        "quant_method": "deliver",
        "version": 1,
        "layers": {
            prefix: {"bits": q.bits, "group_size": q.group_size, "columns": q.shape[1]}
            for prefix, q in quantised(layers).items()
        },
        "ignore": [*plain(layers), *beside(layers)],
    }


def why_not(q: QTensor) -> str | None:
    """None, or a sentence saying why this layer cannot be stored so."""
    if q.act_dtype is not None:
        return f"activations are quantised to {short(q.act_dtype)}; this format is for weights only"
    if q.qdata.dtype not in (torch.int8, torch.uint8) or q.bits not in PACKABLE:
        return f"weights are {q.bits} bits of {short(q.qdata.dtype)}; this format holds integers"
    if q.group_size != -1 and q.shape[1] % q.group_size:
        return f"{q.shape[1]} input features are not a multiple of the group size {q.group_size}"
    return None


def why_not_all(layers: Layers, kv: str | None = None) -> str | None:
    """None, or a sentence saying why these layers cannot share one checkpoint."""
    if kv is not None:
        return "the bundled engine forms the scales of a quantised KV cache itself: ask for it when serving"
    return first_reason(layers, why_not)


def _outliers(prefix: str, get: Get, has: Has, rows: int, columns: int) -> Outliers | None:
    if not has(f"{prefix}.outlier_index"):
        return None
    index = read(get, has, f"{prefix}.outlier_index", (torch.int64,), 1)
    values = read(get, has, f"{prefix}.outlier_value", (torch.int8,), 1)
    scale = read(get, has, f"{prefix}.outlier_scale", _FLOATS, 1)
    expect_shape(f"{prefix}.outlier_value", values, tuple(index.shape))
    expect_shape(f"{prefix}.outlier_scale", scale, (rows,))
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= rows * columns):
        raise wrong(f"{prefix}.outlier_index", f"it leaves the {rows} x {columns} weights")
    return Outliers(index, values, scale)
