"""LMDeploy's smooth_quant: 8-bit weights per output channel, activations dynamically quantised per token.

`X.weight` int8 or FP8 [N, K]; `X.scale` float32 [N, 1] = absmax / qmax. Norms hold their smoothed
float weights (arXiv 2211.10438).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from delivery.formats._checks import (
    Get,
    Has,
    Layers,
    beside,
    expect_shape,
    first_reason,
    one_setting,
    plain,
    quantised,
    read,
    read_scale,
    short,
)
from delivery.qtensor import FLOAT8, QTensor

_DTYPES = (torch.int8, *FLOAT8)


def pack(prefix: str, q: QTensor, bias: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The stored tensors of one layer; `bias` keeps its dtype."""
    tensors = {f"{prefix}.weight": q.qdata, f"{prefix}.scale": q.scale.to(torch.float32)}
    return tensors | ({f"{prefix}.bias": bias} if bias is not None else {})


def unpack(prefix: str, get: Get, has: Has, quantization_config: Mapping[str, Any]) -> QTensor:
    """One layer as a QTensor. Raises DataError `quantised-tensor-missing`, `quantised-tensor-wrong`."""
    weight = read(get, has, f"{prefix}.weight", _DTYPES, 2)
    scale = read_scale(get, has, f"{prefix}.scale")
    expect_shape(f"{prefix}.scale", scale, (weight.shape[0], 1))
    return QTensor(weight, scale, None, -1, 8, act_dtype=weight.dtype)


def is_quantized(prefix: str, has: Has, quantization_config: Mapping[str, Any]) -> bool:
    return has(f"{prefix}.scale")


def quantization_config(layers: Layers, kv: str | None = None) -> dict[str, Any]:
    """The config's entry."""
    first = next(iter(quantised(layers).values()), None)
    return {
        "quant_method": "smooth_quant",
        "quant_dtype": short(first.qdata.dtype if first else torch.int8),
        "modules_to_not_convert": [*plain(layers), *beside(layers)],
    }


def why_not(q: QTensor) -> str | None:
    """None, or a sentence saying why this layer cannot be stored so."""
    if q.qdata.dtype not in _DTYPES:
        return f"weights are {short(q.qdata.dtype)} of {q.bits} bits; this format holds int8 or FP8"
    if q.bits != 8:
        return f"weights have {q.bits} bits; this format holds 8"
    if q.act_dtype != q.qdata.dtype:
        return "activations are not quantised to the weights' dtype, which its kernels expect"
    if q.input_scale is not None:
        return "activation scales are static; this format quantises activations dynamically per token"
    if tuple(q.scale.shape) != (q.shape[0], 1):
        return "scales are not one per output channel"
    return None


def why_not_all(layers: Layers, kv: str | None = None) -> str | None:
    """None, or a sentence saying why these layers cannot share one checkpoint."""
    if kv is not None:
        return f"the format cannot store the scales of a KV cache in {kv}"
    return first_reason(layers, why_not) or one_setting(layers, "dtype", lambda q: short(q.qdata.dtype))
