"""Load: workloads as data, a generator with exact arrival times, and the targets that it drives.

Runs on a bare host: torch only where an engine is driven in process, no other third-party package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delivery.bench.engine_target import EngineTarget
    from delivery.bench.load import run_load
    from delivery.bench.url_target import UrlTarget
    from delivery.bench.workload import Workload, load_workload, workload_names

_HOMES = {
    "EngineTarget": "engine_target",
    "UrlTarget": "url_target",
    "Workload": "workload",
    "load_workload": "workload",
    "run_load": "load",
    "workload_names": "workload",
}

__all__ = ["EngineTarget", "UrlTarget", "Workload", "load_workload", "run_load", "workload_names"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
