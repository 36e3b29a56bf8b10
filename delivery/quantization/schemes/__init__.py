"""Schemes, one per file: `awq_w4a16.py` defines `SCHEME`, called `awq-w4a16`."""

from __future__ import annotations

from pkgutil import iter_modules

_FIRST = ("awq-w4a16", "gptq-w4a16", "rtn-w4a16", "smoothquant-int8", "smoothquant-fp8")


def scheme_names() -> tuple[str, ...]:
    """Every scheme, the usual ones first. Imports none of them."""
    found = {module.name.replace("_", "-") for module in iter_modules(__path__)}
    return (*(n for n in _FIRST if n in found), *sorted(found.difference(_FIRST)))
