"""Block FP8 as DeepSeek-V3 and Qwen publish it: `quant_method: fp8`.

`X.weight` float8_e4m3fn [N, K]; `X.weight_scale_inv` float32 [ceil(N/128), ceil(K/128)], by which
values are multiplied despite its name. Activations are quantised dynamically.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from delivery.errors import DataError
from delivery.formats._checks import (
    Get,
    Has,
    Layers,
    beside,
    expect_shape,
    first_reason,
    plain,
    read,
    read_scale,
    setting,
    short,
    why_not_blocks,
)
from delivery.qtensor import QTensor

_BLOCK = 128


def pack(prefix: str, q: QTensor, bias: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The stored tensors of one layer; `bias` keeps its dtype."""
    tensors = {f"{prefix}.weight": q.qdata, f"{prefix}.weight_scale_inv": q.scale.to(torch.float32)}
    return tensors | ({f"{prefix}.bias": bias} if bias is not None else {})


def unpack(prefix: str, get: Get, has: Has, quantization_config: Mapping[str, Any]) -> QTensor:
    """One layer as a QTensor.

    Raises DataError `quantised-tensor-missing`, `quantised-tensor-wrong`, `quantization-variant`.
    """
    if list(quantization_config.get("weight_block_size") or ()) != [_BLOCK, _BLOCK]:
        raise DataError(
            "quantization-variant",
            "this variant of fp8 cannot be read",
            why=f"weight_block_size is {quantization_config.get('weight_block_size')!r},"
            f" supported is [{_BLOCK}, {_BLOCK}]",
            hint="convert the float checkpoint that it was made from",
        )
    setting(quantization_config, "activation_scheme", ("dynamic", None))
    weight = read(get, has, f"{prefix}.weight", (torch.float8_e4m3fn,), 2)
    scale = read_scale(get, has, f"{prefix}.weight_scale_inv")
    rows, columns = weight.shape
    expect_shape(f"{prefix}.weight_scale_inv", scale, (-(-rows // _BLOCK), -(-columns // _BLOCK)))
    return QTensor(weight, scale.float(), None, -1, 8, act_dtype=weight.dtype, block_size=_BLOCK)


def is_quantized(prefix: str, has: Has, quantization_config: Mapping[str, Any]) -> bool:
    """Whether there are scales; those per tensor (`weight_scale`) are left to `unpack` to refuse."""
    return has(f"{prefix}.weight_scale_inv") or has(f"{prefix}.weight_scale")


def quantization_config(layers: Layers, kv: str | None = None) -> dict[str, Any]:
    """The config's entry."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK, _BLOCK],
        "modules_to_not_convert": [*plain(layers), *beside(layers)],
    }


def why_not(q: QTensor) -> str | None:
    """None, or a sentence saying why this layer cannot be stored so."""
    if q.qdata.dtype != torch.float8_e4m3fn:
        return f"weights are {short(q.qdata.dtype)}; this format holds float8_e4m3fn"
    if q.block_size != _BLOCK:
        return f"scales do not belong to {_BLOCK} x {_BLOCK} blocks"
    if q.act_dtype != torch.float8_e4m3fn:
        return "activations stay in floating point; this format quantises them to float8_e4m3fn"
    return why_not_blocks(q)


def why_not_all(layers: Layers, kv: str | None = None) -> str | None:
    """None, or a sentence saying why these layers cannot share one checkpoint."""
    if kv is not None:
        return f"the format cannot store the scales of a KV cache in {kv}"
    return first_reason(layers, why_not)
