"""Quantisation: pure tensor functions, schemes (one file each), and the layer-by-layer driver.

The package loads lazily: scheme names are known without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from delivery.quantization.schemes import scheme_names

if TYPE_CHECKING:
    from delivery.quantization.driver import Driver
    from delivery.quantization.grid import Grid, dequantize, quantize
    from delivery.quantization.options import Options
    from delivery.quantization.scheme import Scheme, load_scheme

__all__ = ["Driver", "Grid", "Options", "Scheme", "dequantize", "load_scheme", "quantize", "scheme_names"]

_HOMES = {
    "Driver": "driver",
    "Grid": "grid",
    "Options": "options",
    "Scheme": "scheme",
    "dequantize": "grid",
    "load_scheme": "scheme",
    "quantize": "grid",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
