"""Reports: one judgement rendered for machines (JUnit, OpenMetrics, chart numbers) and for people.

Every rendering is made from `report.json` alone, so that what CI shows and what a person reads agree.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delivery.report.renderings import RENDERINGS, render

__all__ = ["RENDERINGS", "render"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"{__name__}.renderings"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
