"""The gate: records and arrays in, a verdict out. numpy only, no torch, no clock, no device."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delivery.gate.family import FamilyVerdict, compare_runs
    from delivery.gate.latency import LatencyVerdict, compare_latency
    from delivery.gate.memory import MemoryVerdict, compare_memory
    from delivery.gate.record import RequestRecord
    from delivery.gate.report import Report, Verdict

_HOMES = {
    "FamilyVerdict": "family",
    "compare_runs": "family",
    "LatencyVerdict": "latency",
    "compare_latency": "latency",
    "MemoryVerdict": "memory",
    "compare_memory": "memory",
    "RequestRecord": "record",
    "Report": "report",
    "Verdict": "report",
}

__all__ = [
    "FamilyVerdict",
    "LatencyVerdict",
    "MemoryVerdict",
    "Report",
    "RequestRecord",
    "Verdict",
    "compare_latency",
    "compare_memory",
    "compare_runs",
]


def __getattr__(name: str) -> Any:
    # Loaded on use: `deliver --help` reads report names without paying for numpy.
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
