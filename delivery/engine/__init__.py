"""The inference engine. The package loads lazily: requests, block pool and scheduler need no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delivery.engine.builder import build
    from delivery.engine.core import EngineCore
    from delivery.engine.llm import LLM, Completion
    from delivery.engine.outputs import EngineStats, RequestOutput
    from delivery.engine.request import Request, SamplingParams

_HOME = {
    "build": "builder",
    "LLM": "llm",
    "Completion": "llm",
    "EngineCore": "core",
    "EngineStats": "outputs",
    "RequestOutput": "outputs",
    "Request": "request",
    "SamplingParams": "request",
}
__all__ = [
    "LLM",
    "Completion",
    "EngineCore",
    "EngineStats",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "build",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
