"""The memory gate: weights and activation peak apart, at an equal number of KV tokens, both directions.

An engine reserves its KV cache up front, so "device memory used" is meaningless. A drop fails as well: it
can be a wrong dtype or a part of the model that is no longer loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from delivery.gate.report import Verdict, worst

if TYPE_CHECKING:
    from collections.abc import Mapping

LIMIT = 0.10
GATED = ("weights_bytes", "peak_bytes")
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ComponentVerdict:
    """One part of the memory, in bytes; `ratio` is candidate / baseline."""

    status: Verdict
    reason: str
    baseline: float = float("nan")
    candidate: float = float("nan")

    @property
    def ratio(self) -> float:
        return self.candidate / self.baseline if self.baseline else float("nan")


@dataclass(frozen=True, slots=True)
class MemoryVerdict:
    """The worst of the components, which are also reachable as `verdict["weights_bytes"]`."""

    status: Verdict
    reason: str
    components: Mapping[str, ComponentVerdict] = field(default_factory=dict)

    def __getitem__(self, name: str) -> ComponentVerdict:
        return self.components[name]


def compare_memory(
    baseline: Mapping[str, float],
    candidate: Mapping[str, float],
    limit: float = LIMIT,
    *,
    floor_bytes: float = 0.0,
) -> MemoryVerdict:
    """Judge `weights_bytes` and `peak_bytes` (the activation peak alone) at equal `kv_tokens`.

    A component fails when it leaves ±`limit` of the baseline by more than `floor_bytes` (0 on a GPU,
    where the allocator counts exactly; resident memory of a CPU process is known less well). A missing,
    negative or non-finite number, or another number of KV tokens, is "invalid".
    Raises ValueError for a limit outside (0, 1) or a floor that is not a finite number from 0 on.
    """
    if not 0.0 < limit < 1.0:
        raise ValueError(f"a memory limit is a share between 0 and 1, got {limit}")
    if not 0.0 <= floor_bytes < math.inf:
        raise ValueError(f"a floor is a number of bytes from 0 on, got {floor_bytes}")
    tokens = baseline.get("kv_tokens"), candidate.get("kv_tokens")
    for side, count in zip(("baseline", "candidate"), tokens, strict=True):
        if count is None:
            return MemoryVerdict(Verdict.INVALID, f"the {side}'s number of KV tokens is missing")
        if not _counts(count):
            return MemoryVerdict(Verdict.INVALID, f"the {side}'s number of KV tokens is {count!r}")
    if tokens[0] != tokens[1]:
        return MemoryVerdict(
            Verdict.INVALID,
            f"the KV cache holds {tokens[1]:g} tokens, the baseline's {tokens[0]:g}: "
            "compare at an equal number of KV tokens",
        )
    parts = {
        name: _component(name, baseline.get(name), candidate.get(name), limit, floor_bytes) for name in GATED
    }
    status = worst([part.status for part in parts.values()])
    said = [f"{name}: {part.reason}" for name, part in parts.items() if part.status is status]
    return MemoryVerdict(status, "; ".join(said), parts)


def _component(
    name: str, baseline: float | None, candidate: float | None, limit: float, floor_bytes: float
) -> ComponentVerdict:
    for side, value in (("baseline", baseline), ("candidate", candidate)):
        if not _counts(value):
            return ComponentVerdict(Verdict.INVALID, f"the {side}'s {name} is {value}, not a positive number")
    assert baseline is not None
    assert candidate is not None
    change = candidate / baseline - 1.0
    reason = f"{_mib(candidate)} against {_mib(baseline)} ({change * 100:+.1f} %, limit ±{limit:.0%})"
    outside = abs(change) > limit + _ROUNDING and abs(candidate - baseline) > floor_bytes
    status = Verdict.FAIL if outside else Verdict.PASS
    return ComponentVerdict(status, reason, float(baseline), float(candidate))


def _counts(value: Any) -> bool:
    """Whether it is a positive, finite number; JSON from elsewhere holds anything."""
    return isinstance(value, Real) and value is not True and 0 < float(value) < math.inf


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
