"""GPTQ (arXiv 2210.17323), the layout of AutoGPTQ and GPTQModel.

`qweight` int32 [K·bits/32, N] sequential along K; `qzeros` int32 [K/g, N·bits/32] sequential along N;
`scales` float16 [K/g, N]; `g_idx` int32 [K], the group of each input feature.
`checkpoint_format: gptq` (version 1) stores zero points less one; `gptq_v2` stores them as they are.
Symmetric weights are written as version 1, which every engine reads; weights with zero points as
version 2, since a zero point of 0 has no unambiguous form in version 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from delivery.formats._bits import PACKABLE, pack_last, signed, unpack_last, unsigned, zero_points
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

_V1, _V2 = "gptq", "gptq_v2"


def pack(
    prefix: str, q: QTensor, bias: torch.Tensor | None = None, version: str | None = None
) -> dict[str, torch.Tensor]:
    """The stored tensors of one layer; `bias` keeps its dtype. version: `gptq`, `gptq_v2` or its own."""
    columns = q.shape[1]
    zeros = zero_points(q).t()
    if (version or _version(q)) == _V1:
        zeros = (zeros - 1) & ((1 << q.bits) - 1)
    groups = q.group_index().to(torch.int32)
    tensors = {
        f"{prefix}.qweight": pack_last(unsigned(q), q.bits)[:, : columns * q.bits // 32].t().contiguous(),
        f"{prefix}.qzeros": pack_last(zeros.contiguous(), q.bits),
        f"{prefix}.scales": q.scale.t().to(torch.float16).contiguous(),
        f"{prefix}.g_idx": groups.contiguous(),
    }
    return tensors | ({f"{prefix}.bias": bias} if bias is not None else {})


def unpack(prefix: str, get: Get, has: Has, quantization_config: Mapping[str, Any]) -> QTensor:
    """One layer as a QTensor; symmetric (int8, no zero point) where every zero point is the middle.

    Raises DataError `quantised-tensor-missing`, `quantised-tensor-wrong` (also for a g_idx that is not
    int32 or leaves the groups), `quantization-variant`.
    """
    bits = int(setting(quantization_config, "bits", PACKABLE))
    version = setting(quantization_config, "checkpoint_format", (_V1, _V2, None)) or _V1
    words = read(get, has, f"{prefix}.qweight", (torch.int32,), 2)
    scales = read_scale(get, has, f"{prefix}.scales")
    columns, outputs = words.shape[0] * 32 // bits, words.shape[1]
    groups = scales.shape[0]
    expect_shape(f"{prefix}.scales", scales, (groups, outputs))
    packed_zeros = read(get, has, f"{prefix}.qzeros", (torch.int32,), 2)
    expect_shape(f"{prefix}.qzeros", packed_zeros, (groups, -(-outputs * bits // 32)))
    zeros = unpack_last(packed_zeros, bits, outputs)
    if version == _V1:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    g_idx = _group_index(prefix, get, has, columns, groups, int(quantization_config.get("group_size", 0)))
    qdata = unpack_last(words.t(), bits, columns)
    symmetric = bool((zeros == 1 << (bits - 1)).all())
    return QTensor(
        qdata=signed(qdata, bits) if symmetric else qdata,
        scale=scales.t().contiguous(),
        zero_point=None if symmetric else zeros.t().contiguous(),
        group_size=-1 if groups == 1 else -(-columns // groups),
        bits=bits,
        g_idx=g_idx,
    )


def is_quantized(prefix: str, has: Has, quantization_config: Mapping[str, Any]) -> bool:
    return has(f"{prefix}.qweight")


def quantization_config(layers: Layers, kv: str | None = None) -> dict[str, Any]:
    """The config's entry; plain layers inside the model are excluded by GPTQModel's `dynamic` rules."""
    first = next(iter(quantised(layers).values()), None)
    excluded = [name for name in plain(layers) if name.split(".")[-1] != "lm_head"]
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": first.bits if first else 4,
        "group_size": first.group_size if first else 128,
        "sym": first is None or first.zero_point is None,
        "desc_act": any(q.g_idx is not None for q in quantised(layers).values()),
        "checkpoint_format": _version(first) if first else _V1,
        "pack_dtype": "int32",
        "lm_head": any(p.split(".")[-1] == "lm_head" for p in quantised(layers)),
    }
    patterns = [f"-:^{re.escape(name)}$" for name in excluded] + [f"-:.*{name}.*" for name in beside(layers)]
    if patterns:
        config["dynamic"] = {pattern: {} for pattern in patterns}
    return config


def why_not(q: QTensor) -> str | None:
    """None, or a sentence saying why this layer cannot be stored so."""
    if reason := why_not_integers(q, PACKABLE):
        return reason
    per_word = 32 // q.bits
    rows, columns = q.shape
    if columns % per_word or rows % per_word:
        return f"[{rows}, {columns}] is not a multiple of {per_word}, and {per_word} values share a word"
    return why_not_half_scales(q)


def why_not_all(layers: Layers, kv: str | None = None) -> str | None:
    """None, or a sentence saying why these layers cannot share one checkpoint."""
    if kv is not None:
        return f"the format cannot store the scales of a KV cache in {kv}"
    return (
        first_reason(layers, why_not)
        or one_setting(layers, "group size", lambda q: q.group_size)
        or one_setting(layers, "width", lambda q: f"{q.bits} bits")
        or one_setting(layers, "kind", lambda q: "symmetric" if q.zero_point is None else "zero points")
    )


def _version(q: QTensor) -> str:
    return _V1 if q.zero_point is None else _V2


def _group_index(
    prefix: str, get: Get, has: Has, columns: int, groups: int, group_size: int
) -> torch.Tensor | None:
    """g_idx where it says more than consecutive groups do."""
    consecutive = columns if groups == 1 else group_size if group_size > 0 else columns // groups
    name = f"{prefix}.g_idx"
    if not has(name):
        if consecutive * groups != columns:
            raise wrong(f"{prefix}.scales", f"{columns} input features cannot be split into {groups} groups")
        return None
    g_idx = read(get, has, name, (torch.int32,), 1)
    expect_shape(name, g_idx, (columns,))
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise wrong(name, f"it points to groups {low} to {high}, there are 0 to {groups - 1}")
    usual = torch.arange(columns, dtype=torch.int32, device=g_idx.device) // consecutive
    return None if torch.equal(g_idx, usual) else g_idx
