"""compressed-tensors, the format of vLLM and LLM Compressor: integers packed or plain, and FP8.

pack-quantized   weight-only integers of 4 or 8 bits: `weight_packed` int32 [N, ceil(K·bits/32)], storing
                 q + 2^(bits−1), sequential along K; `weight_scale` [N, K/g]; `weight_shape` int64 [2];
                 with zero points also `weight_zero_point` int32 [ceil(N·bits/32), K/g], packed along N.
int-quantized    W8A8: `weight` int8 [N, K], `weight_scale` [N, 1].
float-quantized  FP8 (float8_e4m3fn): `weight` [N, K], `weight_scale` [N, 1], [1] (with a static
                 `input_scale` [1]) or [ceil(N/128), ceil(K/128)].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from delivery.formats._bits import pack_last, signed, unpack_last, unsigned, zero_points
from delivery.formats._checks import (
    Get,
    Has,
    Layers,
    beside,
    checked_scale,
    expect_shape,
    first_reason,
    plain,
    quantised,
    read,
    read_scale,
    short,
    why_not_blocks,
    why_not_integers,
    wrong,
)
from delivery.formats._schemes import group_of, groups, kv_cache_scheme, why_not_kv
from delivery.qtensor import QTensor

_BLOCK = 128
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def pack(prefix: str, q: QTensor, bias: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The stored tensors of one layer; `bias` and the dtype of the scales are kept."""
    tensors = _packed(q) if _is_packed(q) else _plain(q)
    named = {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
    return named | ({f"{prefix}.bias": bias} if bias is not None else {})


def pack_kv(prefix: str, k_scale: torch.Tensor, v_scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """KV cache scales [1] of one attention module (`model.layers.0.self_attn`).

    Raises DataError `quantised-tensor-wrong` for scales that are not finite and positive.
    """
    scales = {f"{prefix}.k_scale": k_scale, f"{prefix}.v_scale": v_scale}
    return {name: checked_scale(name, scale.reshape(1)) for name, scale in scales.items()}


def unpack_kv(prefix: str, get: Get, has: Has) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(k_scale, v_scale), each [1], of one attention module; None where it has none."""
    if not has(f"{prefix}.k_scale") and not has(f"{prefix}.v_scale"):
        return None
    k, v = (
        checked_scale(name, read(get, has, name, _FLOATS, 1))
        for name in (f"{prefix}.k_scale", f"{prefix}.v_scale")
    )
    return k, v


def unpack(prefix: str, get: Get, has: Has, quantization_config: Mapping[str, Any]) -> QTensor:
    """One layer as a QTensor.

    Raises DataError `quantised-tensor-missing`, `quantised-tensor-wrong`, `quantization-variant`.
    """
    group = group_of(prefix, quantization_config)
    if has(f"{prefix}.weight_packed"):
        return _unpack_packed(prefix, get, has, group)
    return _unpack_plain(prefix, get, has, group)


def is_quantized(prefix: str, has: Has, quantization_config: Mapping[str, Any]) -> bool:
    return has(f"{prefix}.weight_packed") or has(f"{prefix}.weight_scale")


def quantization_config(layers: Layers, kv: str | None = None) -> dict[str, Any]:
    """The config's entry: one group for each kind of layer, plain ones in `ignore`. kv: None, fp8 or int8."""
    found = groups(quantised(layers), _layout)
    formats = sorted({str(g["format"]) for g in found.values()})
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else "mixed-precision" if formats else "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": found,
        "ignore": [*plain(layers), *(f"re:.*{name}.*" for name in beside(layers))],
        "kv_cache_scheme": kv_cache_scheme(kv),
    }


def why_not(q: QTensor) -> str | None:
    """None, or a sentence saying why this layer cannot be stored so."""
    if q.qdata.dtype == torch.float8_e5m2:
        return "weights are float8_e5m2; float-quantized means float8_e4m3fn"
    if q.qdata.dtype == torch.float8_e4m3fn:
        if q.act_dtype not in (None, torch.float8_e4m3fn):
            return f"FP8 weights with activations in {short(q.act_dtype)} have no kernel"
        return why_not_blocks(q)
    if q.act_dtype is None:
        if q.g_idx is not None:
            return "input features are reordered (g_idx), which the format's loader gave up in 2026"
        return why_not_integers(q, (4, 8))
    if q.act_dtype != torch.int8 or q.bits != 8 or q.zero_point is not None:
        return "quantised activations need symmetric 8-bit weights of the same dtype"
    if q.group_size != -1:
        return "W8A8 has one scale per output channel, not per group"
    return None


def why_not_all(layers: Layers, kv: str | None = None) -> str | None:
    """None, or a sentence saying why these layers cannot share one checkpoint."""
    return why_not_kv(kv) or first_reason(layers, why_not)


def _is_packed(q: QTensor) -> bool:
    return q.act_dtype is None and q.qdata.dtype in (torch.int8, torch.uint8)


def _layout(q: QTensor) -> str:
    if _is_packed(q):
        return "pack-quantized"
    return "int-quantized" if q.qdata.dtype == torch.int8 else "float-quantized"


def _packed(q: QTensor) -> dict[str, torch.Tensor]:
    tensors = {
        "weight_packed": pack_last(unsigned(q), q.bits),
        "weight_scale": q.scale,
        "weight_shape": torch.tensor(q.shape, dtype=torch.int64),
    }
    if q.zero_point is not None:
        zeros = zero_points(q).t().contiguous()
        tensors["weight_zero_point"] = pack_last(zeros, q.bits).t().contiguous()
    return tensors


def _plain(q: QTensor) -> dict[str, torch.Tensor]:
    per_tensor = q.scale.numel() == 1 and q.block_size is None and q.input_scale is not None
    tensors = {"weight": q.qdata, "weight_scale": q.scale.reshape(1) if per_tensor else q.scale}
    return tensors | ({"input_scale": q.input_scale.reshape(1)} if q.input_scale is not None else {})


def _unpack_packed(prefix: str, get: Get, has: Has, group: Mapping[str, Any]) -> QTensor:
    words = read(get, has, f"{prefix}.weight_packed", (torch.int32,), 2)
    scale = read_scale(get, has, f"{prefix}.weight_scale")
    rows, columns = _stored_shape(prefix, get, has, words)
    bits = int(group["weights"]["num_bits"])
    if bits not in (2, 4, 8):
        raise wrong(f"{prefix}.weight_packed", f"{bits} bits; 2, 4 and 8 can be read")
    expect_shape(f"{prefix}.weight_packed", words, (rows, -(-columns * bits // 32)))
    count = scale.shape[1]
    expect_shape(f"{prefix}.weight_scale", scale, (rows, count))
    if columns % count:
        raise wrong(f"{prefix}.weight_scale", f"{columns} input features cannot be split into {count} groups")
    qdata = unpack_last(words, bits, columns)
    zero_point = None
    if has(f"{prefix}.weight_zero_point"):
        name = f"{prefix}.weight_zero_point"
        packed = read(get, has, name, (torch.int32,), 2)
        expect_shape(name, packed, (-(-rows * bits // 32), count))
        zero_point = unpack_last(packed.t(), bits, rows).t().contiguous()
    return QTensor(
        qdata=qdata if zero_point is not None else signed(qdata, bits),
        scale=scale,
        zero_point=zero_point,
        group_size=-1 if count == 1 else columns // count,
        bits=bits,
        g_idx=_group_index(prefix, get, has, columns, count),
    )


def _unpack_plain(prefix: str, get: Get, has: Has, group: Mapping[str, Any]) -> QTensor:
    weight = read(get, has, f"{prefix}.weight", (torch.int8, torch.float8_e4m3fn), 2)
    rows, columns = weight.shape
    name = f"{prefix}.weight_scale"
    scale = get(name) if has(name) else torch.empty(0)
    scale = read_scale(get, has, name, 1 if scale.dim() <= 1 else 2)
    blocks = group["weights"].get("strategy") == "block"
    if blocks:
        expect_shape(name, scale, (-(-rows // _BLOCK), -(-columns // _BLOCK)))
    elif scale.numel() == 1:
        scale = scale.reshape(1, 1)
    else:
        scale = scale.reshape(-1, 1) if scale.dim() == 1 else scale
        expect_shape(name, scale, (rows, 1))
    if has(f"{prefix}.weight_zero_point"):
        raise wrong(f"{prefix}.weight_zero_point", "8-bit weights with zero points cannot be read")
    input_scale = None
    if has(f"{prefix}.input_scale"):
        stored = get(f"{prefix}.input_scale")
        if stored.numel() != 1:
            raise wrong(f"{prefix}.input_scale", f"expected one scale, got {tuple(stored.shape)}")
        input_scale = checked_scale(f"{prefix}.input_scale", stored.reshape(1).float())
    return QTensor(
        qdata=weight,
        scale=scale,
        zero_point=None,
        group_size=-1,
        bits=8,
        input_scale=input_scale,
        act_dtype=weight.dtype if group.get("input_activations") else None,
        block_size=_BLOCK if blocks else None,
    )


def _stored_shape(prefix: str, get: Get, has: Has, words: torch.Tensor) -> tuple[int, int]:
    name = f"{prefix}.weight_shape"
    shape = read(get, has, name, (torch.int64, torch.int32), 1)
    expect_shape(name, shape, (2,))
    rows, columns = (int(v) for v in shape)
    if rows != words.shape[0] or columns <= 0:
        raise wrong(name, f"it says {rows} x {columns}, weight_packed has {words.shape[0]} rows")
    return rows, columns


def _group_index(prefix: str, get: Get, has: Has, columns: int, count: int) -> torch.Tensor | None:
    name = f"{prefix}.weight_g_idx"
    if not has(name):
        return None
    g_idx = read(get, has, name, (torch.int32,), 1)
    expect_shape(name, g_idx, (columns,))
    low, high = int(g_idx.min()), int(g_idx.max())
    if (low, high) == (-1, -1):
        return None
    if low < 0 or high >= count:
        raise wrong(name, f"it points to groups {low} to {high}, there are 0 to {count - 1}")
    return g_idx
