"""Pipelines: loading, planning and running them, and the artifact store."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delivery.pipeline.planner import plan
    from delivery.pipeline.runner import run
    from delivery.pipeline.single import run_step
    from delivery.pipeline.spec import Pipeline, load_pipeline
    from delivery.pipeline.store import Store

_HOMES = {
    "Pipeline": "spec",
    "Store": "store",
    "load_pipeline": "spec",
    "plan": "planner",
    "run": "runner",
    "run_step": "single",
}

__all__ = ["Pipeline", "Store", "load_pipeline", "plan", "run", "run_step"]


def __getattr__(name: str) -> Any:
    # Loaded on use: a command that only reads the store does not pay for pydantic.
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
