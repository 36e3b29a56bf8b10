"""The `config_groups` of compressed-tensors: from layers to groups, and from a layer's name to its group."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from delivery.errors import DataError
from delivery.qtensor import QTensor

_BLOCK = 128
_KV = {"fp8": "float", "int8": "int"}


def groups(layers: Mapping[str, QTensor], layout: Callable[[QTensor], str]) -> dict[str, dict[str, Any]]:
    """One group per kind of layer; a single kind targets "Linear", several name their layers."""
    kinds: list[tuple[dict[str, Any], list[str]]] = []
    for prefix, q in layers.items():
        kind = {
            "weights": _weights(q),
            "input_activations": _activations(q),
            "output_activations": None,
            "format": layout(q),
        }
        for known, prefixes in kinds:
            if known == kind:
                prefixes.append(prefix)
                break
        else:
            kinds.append((kind, [prefix]))
    return {
        f"group_{i}": {"targets": ["Linear"] if len(kinds) == 1 else prefixes, **kind}
        for i, (kind, prefixes) in enumerate(kinds)
    }


def group_of(prefix: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group that a layer belongs to: by name, then by pattern, then by class.

    Raises DataError `quantization-variant` where none names it or the group says nothing of weights.
    """
    found = list((config.get("config_groups") or {}).values())
    for matches in (_by_name, _by_pattern, _by_class):
        for group in found:
            if isinstance(group, Mapping) and any(matches(str(t), prefix) for t in group.get("targets", [])):
                if not isinstance(group.get("weights"), Mapping):
                    raise _unreadable(f"the group of {prefix} says nothing of weights")
                return group
    raise _unreadable(f"no group of config_groups names {prefix}")


def kv_cache_scheme(kv: str | None) -> dict[str, Any] | None:
    """The config's `kv_cache_scheme` for fp8 or int8, one scale per layer for k and one for v."""
    if kv is None:
        return None
    return _args(8, _KV[kv], "tensor", dynamic=False)


def why_not_kv(kv: str | None) -> str | None:
    if kv is None or kv in _KV:
        return None
    return f"a KV cache in {kv} has no form in this format; {' and '.join(_KV)} have"


def _weights(q: QTensor) -> dict[str, Any]:
    kind = "float" if q.qdata.is_floating_point() else "int"
    if q.block_size is not None:
        return _args(8, kind, "block", dynamic=False) | {"block_structure": [_BLOCK, _BLOCK]}
    if q.group_size != -1:
        strategy, size = "group", {"group_size": q.group_size}
    else:
        per_tensor = q.input_scale is not None and q.scale.numel() == 1
        strategy, size = ("tensor" if per_tensor else "channel"), {}
    return _args(q.bits, kind, strategy, dynamic=False) | size | {"symmetric": q.zero_point is None}


def _activations(q: QTensor) -> dict[str, Any] | None:
    if q.act_dtype is None:
        return None
    kind = "int" if q.act_dtype == torch.int8 else "float"
    if q.input_scale is not None:
        return _args(8, kind, "tensor", dynamic=False)
    if q.block_size is not None:
        return _args(8, kind, "group", dynamic=True) | {"group_size": _BLOCK}
    return _args(8, kind, "token", dynamic=True)


def _args(bits: int, kind: str, strategy: str, *, dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": None,
        "dynamic": dynamic,
    }


def _by_name(target: str, prefix: str) -> bool:
    return target == prefix


def _by_pattern(target: str, prefix: str) -> bool:
    try:
        return target.startswith("re:") and re.match(target[3:], prefix) is not None
    except re.error:
        return False


def _by_class(target: str, prefix: str) -> bool:
    return target == "Linear"


def _unreadable(why: str) -> DataError:
    return DataError(
        "quantization-variant",
        "this compressed-tensors checkpoint cannot be read",
        why=why,
        hint="convert the float checkpoint that it was made from",
    )
