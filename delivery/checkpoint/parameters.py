"""Number of parameters in stored tensors, packed ones included. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from delivery.checkpoint.header import TensorInfo

_PACKED = ("qweight", "weight_packed")
_AUXILIARY = frozenset(
    {
        "qzeros",
        "scales",
        "scale",
        "g_idx",
        "weight_scale",
        "weight_scale_inv",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "input_scale",
        "k_scale",
        "v_scale",
        "outlier_index",
        "outlier_value",
        "outlier_scale",
    }
)


def bits_of(quantization: Mapping[str, Any]) -> int:
    """Bits of a packed weight by a `quantization_config`; 4 where it does not say."""
    layers = list((quantization.get("layers") or {}).values())
    groups = [g.get("weights") or {} for g in (quantization.get("config_groups") or {}).values()]
    for entry in (quantization, *layers, *groups):
        for key in ("bits", "num_bits"):
            if isinstance(entry, Mapping) and isinstance(entry.get(key), int):
                return int(entry[key])
    return 4


def parameters_of(
    tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any] | None
) -> dict[str, int]:
    """Tensor name → parameters: elements, or the weights in packed words; 0 for scales and the like.

    Words that are not full count whole, at most 31 bits a row.
    """
    out = {}
    for name, info in tensors.items():
        leaf = name.rpartition(".")[2]
        if quantization is not None and leaf in _AUXILIARY:
            out[name] = 0
        elif quantization is not None and leaf in _PACKED:
            out[name] = info.count * 32 // bits_of(quantization)
        else:
            out[name] = info.count
    return out
