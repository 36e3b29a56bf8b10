"""Triton's interpreter without its most costly habit.

On entry to every interpreted function, however deep, it searches the whole of `triton.language` for what it
has to replace, and finds the same names each time: a third of the time of such a test. Here it searches once.
What this replaces is private: where a release of Triton has other functions, it stays as it is, and slow.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_PARAMETERS = {"_patch_builtin": 3, "_patch_attr": 5}
"""Private functions of the interpreter, and how many parameters they have."""


@cache
def _builtins(package: Any) -> tuple[str, ...]:
    return tuple(name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Stands for the interpreter's `_patch_builtin`."""
    for name in _builtins(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


def why_not() -> str | None:
    """Why this release of Triton is left as it is."""
    for name, count in _PARAMETERS.items():
        found = getattr(interpreter, name, None)
        if found is None:
            return f"its interpreter has no {name}"
        if len(inspect.signature(found).parameters) != count:
            return f"{name} of its interpreter has other parameters than expected"
    return None if hasattr(tl.core, "is_builtin") else "its language has no is_builtin"


def install() -> bool:
    """Whether the interpreter is quick now. To be called before the first kernel runs, while nothing is
    replaced."""
    if why_not() is not None:
        return False
    for package in (tl, tl.core, tl.tensor, tl.math, getattr(tl.core, "tensor_descriptor_base", None)):
        if package is not None:
            _builtins(package)
    interpreter._patch_builtin = patch_builtin
    return True
