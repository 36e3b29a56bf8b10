"""Operators, one per file. `OPS` maps a name to its Op and is filled on first use.

A file `kernels/<name>.py` that defines a module-level `OP` is an operator; nothing else registers it.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delivery.kernels.op import Op

    OPS: Mapping[str, Op]


def __getattr__(name: str) -> object:
    if name != "OPS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (import_module(f"{__name__}.{m.name}") for m in iter_modules(__path__) if m.name != "op")
    ops = {module.OP.name: module.OP for module in modules if hasattr(module, "OP")}
    globals()["OPS"] = ops
    return ops
