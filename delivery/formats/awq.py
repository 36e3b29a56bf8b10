"""AWQ, the "gemm" layout of AutoAWQ (arXiv 2306.00978): 4-bit weights with groups along the inputs.

`qweight` int32 [K, N/8], `qzeros` int32 [K/g, N/8], `scales` float16 [K/g, N]. Word c holds columns
8c .. 8c+7, nibble i (from the least significant) that of column 8c + (0,2,4,6,1,3,5,7)[i].
Symmetric weights are written with every zero point 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from delivery.formats._bits import unsigned, zero_points
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
    setting,
    why_not_half_scales,
    why_not_integers,
    wrong,
)
from delivery.qtensor import QTensor

_BITS = 4
_BYTES = ((0, 2), (4, 6), (1, 3), (5, 7))
"""The columns in the low and the high nibble of each byte of a word."""


def pack(prefix: str, q: QTensor, bias: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The stored tensors of one layer; `bias` keeps its dtype."""
    tensors = {
        f"{prefix}.qweight": _pack(unsigned(q)),
        f"{prefix}.qzeros": _pack(zero_points(q)),
        f"{prefix}.scales": q.scale.t().to(torch.float16).contiguous(),
    }
    return tensors | ({f"{prefix}.bias": bias} if bias is not None else {})


def unpack(prefix: str, get: Get, has: Has, quantization_config: Mapping[str, Any]) -> QTensor:
    """One layer as a QTensor with zero points.

    Raises DataError `quantised-tensor-missing`, `quantised-tensor-wrong`, `quantization-variant`.
    """
    setting(quantization_config, "version", ("gemm", "GEMM", None))
    setting(quantization_config, "bits", (_BITS,))
    words = read(get, has, f"{prefix}.qweight", (torch.int32,), 2)
    scales = read_scale(get, has, f"{prefix}.scales")
    columns, outputs = words.shape[0], words.shape[1] * 8
    groups = scales.shape[0]
    if columns % groups:
        raise wrong(f"{prefix}.scales", f"{columns} input features cannot be split into {groups} groups")
    expect_shape(f"{prefix}.scales", scales, (groups, outputs))
    zeros = read(get, has, f"{prefix}.qzeros", (torch.int32,), 2)
    expect_shape(f"{prefix}.qzeros", zeros, (groups, outputs // 8))
    return QTensor(
        qdata=_unpack(words),
        scale=scales.t().contiguous(),
        zero_point=_unpack(zeros),
        group_size=-1 if groups == 1 else columns // groups,
        bits=_BITS,
    )


def is_quantized(prefix: str, has: Has, quantization_config: Mapping[str, Any]) -> bool:
    return has(f"{prefix}.qweight")


def quantization_config(layers: Layers, kv: str | None = None) -> dict[str, Any]:
    """The config's entry; plain layers go into `modules_to_not_convert`, which matches by substring."""
    sizes = {q.group_size for q in quantised(layers).values()}
    return {
        "quant_method": "awq",
        "bits": _BITS,
        "group_size": sizes.pop() if sizes else 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": [*plain(layers), *beside(layers)],
    }


def why_not(q: QTensor) -> str | None:
    """None, or a sentence saying why this layer cannot be stored so."""
    if reason := why_not_integers(q, (_BITS,)):
        return reason
    if q.g_idx is not None:
        return "input features are reordered (g_idx); AWQ's groups are consecutive"
    if q.shape[0] % 8:
        return f"{q.shape[0]} output features are not a multiple of 8, and 8 share a word"
    return why_not_half_scales(q)


def why_not_all(layers: Layers, kv: str | None = None) -> str | None:
    """None, or a sentence saying why these layers cannot share one checkpoint."""
    if kv is not None:
        return f"the format cannot store the scales of a KV cache in {kv}"
    if reason := first_reason(layers, why_not):
        return reason
    if reason := one_setting(layers, "group size", lambda q: q.group_size):
        return reason
    for name in (*plain(layers), *beside(layers)):
        for prefix in quantised(layers):
            if name in prefix:
                return f"{name} stays unquantised, and as a substring its name would exclude {prefix} too"
    return None


def _pack(values: torch.Tensor) -> torch.Tensor:
    """uint8 [N, R] → int32 [R, N/8], transposed as it is packed: bytes first, words last."""
    eights = values.reshape(values.shape[0] // 8, 8, -1)
    octets = [eights[:, low] | (eights[:, high] << _BITS) for low, high in _BYTES]
    return torch.stack(octets, -1).view(torch.int32).squeeze(-1).t().contiguous()


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, N/8] → uint8 [N, R]."""
    octets = words.t().contiguous().unsqueeze(-1).view(torch.uint8)
    eights = torch.empty(octets.shape[0], 8, octets.shape[1], dtype=torch.uint8, device=words.device)
    for index, (low, high) in enumerate(_BYTES):
        eights[:, low] = octets[..., index] & 15
        eights[:, high] = octets[..., index] >> _BITS
    return eights.reshape(-1, octets.shape[1])
