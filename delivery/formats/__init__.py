"""On-disk layouts of quantised weights, one per file: `formats/<name>.py` packs and unpacks a QTensor.

A format module has
    pack(prefix, qtensor, bias=None) -> dict[str, Tensor]
    unpack(prefix, get, has, quantization_config) -> QTensor
    is_quantized(prefix, has, quantization_config) -> bool
    quantization_config(layers, kv=None) -> dict
    why_not(qtensor) -> str | None
    why_not_all(layers, kv=None) -> str | None
`layers` maps the prefix of every linear layer (routers and lm_head too) to its QTensor, or to None
where it stays plain. Only shapes, dtypes and settings are read from it, so the tensors may lie on the
meta device (`qtensor.to("meta")`) and a whole model costs nothing.

Names are known without importing a format; a module is loaded when it is used. Modules whose name
starts with an underscore are shared parts.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from delivery.errors import DataError, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delivery.qtensor import QTensor


def format_names() -> tuple[str, ...]:
    """What `--format` takes: module names with dashes, but `smooth_quant` as LMDeploy spells it."""
    return tuple(sorted(_public(m.name) for m in iter_modules(__path__) if not m.name.startswith("_")))


def load_format(name: str) -> Any:
    """The module of a format. Raises UsageError `unknown-format`."""
    if name not in format_names():
        raise UsageError(
            "unknown-format", f"there is no format {name!r}", hint=did_you_mean(name, format_names())
        )
    return import_module(f"{__name__}.{name.replace('-', '_')}")


def format_of(quantization_config: Mapping[str, Any]) -> Any:
    """The format module that reads a checkpoint's `quantization_config`; its name is the `quant_method`.

    Raises DataError `quantization-unknown`, naming what can be read.
    """
    return load_format(method_of(quantization_config))


def method_of(quantization_config: Mapping[str, Any]) -> str:
    """The format's name, without loading it. Raises as `format_of`."""
    method = str(quantization_config.get("quant_method", ""))
    if method in format_names():
        return method
    raise DataError(
        "quantization-unknown",
        f"checkpoints quantised with {method!r} cannot be read",
        why=f"quant_method may be {', '.join(format_names())}",
        hint="convert the float checkpoint that it was made from",
    )


def check_export(name: str, layers: Mapping[str, QTensor | None], kv: str | None = None) -> None:
    """Raises UsageError `format-refuses` with the reason where a format cannot hold these layers."""
    module = load_format(name)
    reason = module.why_not_all(layers, kv)
    if reason is not None:
        raise UsageError(
            "format-refuses",
            f"format {name} cannot represent what was requested",
            why=reason,
            hint="another --format or other settings; deliver explain format-refuses",
        )


def _public(module: str) -> str:
    return module if module == "smooth_quant" else module.replace("_", "-")
