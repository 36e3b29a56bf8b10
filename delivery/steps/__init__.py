"""Steps, one per file: `steps/<name>.py` defines the step class of that name.

Listing the names imports no step; a class is loaded when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from delivery.errors import UsageError, did_you_mean

_NO_STEPS = ("ahead", "sizes", "step")  # modules of this package that define no step
_ORDER = ("convert", "calibrate", "quantize", "build", "smoke", "evaluate", "compare", "package")


def step_names() -> tuple[str, ...]:
    """All step names, those of the standard chain first and in order."""
    found = {m.name for m in iter_modules(__path__)}.difference(_NO_STEPS)
    return (*(n for n in _ORDER if n in found), *sorted(found.difference(_ORDER)))


def step_class(name: str) -> type[Any]:
    """The step class called `name`. Raises UsageError `unknown-step`."""
    if name not in step_names():
        raise UsageError("unknown-step", f"there is no step {name!r}", hint=did_you_mean(name, step_names()))
    module = import_module(f"{__name__}.{name}")
    for value in vars(module).values():
        if isinstance(value, type) and getattr(value, "name", None) == name:
            return value
    raise TypeError(f"steps/{name}.py defines no step called {name!r}")


class _Catalog(Mapping[str, type[Any]]):
    """Step name → step class; looking a name up imports its file."""

    def __getitem__(self, name: str) -> type[Any]:
        return step_class(name)

    def __contains__(self, name: object) -> bool:
        return name in step_names()

    def __iter__(self) -> Iterator[str]:
        return iter(step_names())

    def __len__(self) -> int:
        return len(step_names())


CATALOG: Mapping[str, type[Any]] = _Catalog()
