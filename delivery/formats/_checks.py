"""Checks that formats share: why a layer cannot be stored, and whether a stored tensor is valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from delivery.errors import DataError
from delivery.qtensor import QTensor

Get = Callable[[str], torch.Tensor]
Has = Callable[[str], bool]
Layers = Mapping[str, QTensor | None]
_HALF_MAX = 65504.0


def why_not_integers(q: QTensor, bits: tuple[int, ...]) -> str | None:
    """A reason unless `q` is weight-only, of integers, grouped or per channel, of one of these widths."""
    if q.act_dtype is not None:
        return f"activations are quantised to {short(q.act_dtype)}; this format is for weights only"
    if q.qdata.dtype not in (torch.int8, torch.uint8):
        return f"weights are {short(q.qdata.dtype)}; this format holds integers"
    if q.outliers is not None:
        return "outliers are kept at 6 bits; only the engine's own format (deliver) can store them"
    if q.bits not in bits:
        return f"weights have {q.bits} bits; this format holds {' or '.join(map(str, bits))}"
    if q.block_size is not None:
        return "scales belong to blocks of rows and columns; this format has groups of input features"
    if q.group_size != -1 and q.shape[1] % q.group_size and q.g_idx is None:
        return f"{q.shape[1]} input features are not a multiple of the group size {q.group_size}"
    return None


def why_not_blocks(q: QTensor) -> str | None:
    """A reason where blocks cut the input features unevenly: activations are quantised block by block too."""
    if q.block_size is None or q.shape[1] % q.block_size == 0:
        return None
    return f"{q.shape[1]} input features are not a multiple of the block size {q.block_size}"


def why_not_half_scales(q: QTensor) -> str | None:
    """A reason where a scale is infinite or zero as float16."""
    if q.scale.device.type == "meta":
        return None
    if bool((q.scale.abs() > _HALF_MAX).any()):
        return f"a scale of {float(q.scale.abs().max()):g} does not fit float16, in which scales are stored"
    if bool((q.scale.to(torch.float16) == 0).any()):
        return "a scale becomes zero in float16, in which scales are stored"
    return None


def first_reason(layers: Layers, why_not: Callable[[QTensor], str | None]) -> str | None:
    """The first layer's reason, with its name."""
    for prefix, q in layers.items():
        if q is not None and (reason := why_not(q)) is not None:
            return f"{prefix}: {reason}"
    return None


def quantised(layers: Layers) -> dict[str, QTensor]:
    return {prefix: q for prefix, q in layers.items() if q is not None}


def plain(layers: Layers) -> list[str]:
    """Prefixes of layers that stay unquantised; lm_head is one of them even when tied.

    Layers of a module outside the decoder (a vision tower) are not listed: `beside` has the module.
    """
    names = [prefix for prefix, q in layers.items() if q is None and not _beside(prefix, layers)]
    return names if any(p.split(".")[-1] == "lm_head" for p in layers) else [*names, "lm_head"]


def beside(layers: Layers) -> list[str]:
    """Names of modules outside the decoder, all of which stay unquantised.

    Engines put their own prefixes before a vision tower's name, and keep the name.
    """
    return sorted({_beside(prefix, layers) for prefix, q in layers.items() if q is None} - {""})


def _beside(prefix: str, layers: Layers) -> str:
    """The module outside the decoder that holds a layer; "" for a decoder or top-level layer."""
    roots = {p.split(".layers.")[0] for p in quantised(layers) if ".layers." in p}
    if not roots or any(prefix.startswith(f"{root}.layers.") for root in roots):
        return ""
    known = {part for root in roots for part in root.split(".")}
    rest = [part for part in prefix.split(".") if part not in known]
    return rest[0] if rest and prefix != rest[0] else ""


def one_setting(layers: Layers, name: str, of: Callable[[QTensor], object]) -> str | None:
    """A reason where layers differ in a setting that the format states once for all."""
    seen: dict[object, str] = {}
    for prefix, q in quantised(layers).items():
        seen.setdefault(of(q), prefix)
    if len(seen) <= 1:
        return None
    (a, first), (b, second) = list(seen.items())[:2]
    return f"the format knows one {name} for all layers: {first} has {a}, {second} has {b}"


def read(get: Get, has: Has, name: str, dtypes: tuple[torch.dtype, ...], dimensions: int) -> torch.Tensor:
    """A tensor of one of these dtypes.

    Raises DataError `quantised-tensor-missing`, `quantised-tensor-wrong`.
    """
    if not has(name):
        raise DataError(
            "quantised-tensor-missing",
            f"tensor {name!r} is missing",
            why="the layer's other quantised tensors are there",
            hint="get the checkpoint again, or quantise it again",
        )
    tensor = get(name)
    if tensor.numel() == 0:
        raise wrong(name, f"it is empty: {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes or tensor.dim() != dimensions:
        wanted = " or ".join(short(d) for d in dtypes)
        raise wrong(
            name,
            f"expected {dimensions} dimensions of {wanted}, got {short(tensor.dtype)} {tuple(tensor.shape)}",
        )
    return tensor


def read_scale(get: Get, has: Has, name: str, dimensions: int = 2) -> torch.Tensor:
    """Scales, all finite and not zero."""
    scale = read(get, has, name, (torch.float16, torch.bfloat16, torch.float32), dimensions)
    return checked_scale(name, scale)


def checked_scale(name: str, scale: torch.Tensor) -> torch.Tensor:
    """The scales. Raises DataError `quantised-tensor-wrong` where one is not finite, or zero."""
    values = scale.float()
    if not bool(torch.isfinite(values).all()):
        raise wrong(name, f"{int((~torch.isfinite(values)).sum())} of {scale.numel()} scales are not finite")
    if bool((values == 0).any()):
        raise wrong(
            name, f"{int((values == 0).sum())} of {scale.numel()} scales are zero: an unwritten block"
        )
    return scale


def expect_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise wrong(name, f"expected the shape {shape}, got {tuple(tensor.shape)}")


def wrong(name: str, why: str) -> DataError:
    return DataError(
        "quantised-tensor-wrong",
        f"tensor {name!r} is not what its format says",
        why=why,
        hint="get the checkpoint again, or quantise it again",
    )


def setting(config: Mapping[str, Any], key: str, allowed: tuple[object, ...]) -> Any:
    """A setting of a quantization_config. Raises DataError `quantization-variant`."""
    value = config.get(key)
    if value not in allowed:
        raise DataError(
            "quantization-variant",
            f"this variant of {config.get('quant_method')} cannot be read",
            why=f"{key} is {value!r}, supported are {', '.join(map(repr, allowed))}",
            hint="convert the float checkpoint that it was made from",
        )
    return value


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
