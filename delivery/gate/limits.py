"""Limits: absolute bounds on metrics from the pipeline file's `gate: limits:` mapping.

A number bounds the bad side of a metric (the top of what should be low, the bottom of what should be
high); `{min: …, max: …}` bounds both. A name without a corpus holds for every corpus; a name with one
(`english_perplexity`) takes precedence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from delivery.errors import UsageError, did_you_mean
from delivery.gate.metrics import NEVER_BOUNDED, UNDER_LOAD, definition
from delivery.gate.report import Metric, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

INFINITE = 1e300
"""Written for a value that is not finite: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The allowed range of a metric, in its own unit; None leaves a side open."""

    low: float | None = None
    high: float | None = None

    def allows(self, value: float) -> bool:
        """Whether the value lies inside; a value that is not finite never does."""
        if not math.isfinite(value):
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def beside(self, value: float) -> float | None:
        """The number to show next to the value: the side that it left, else the upper one."""
        if self.low is not None and (self.high is None or value < self.low):
            return self.low
        return self.high


def parse_target(name: str, value: Any, *, under_load: bool) -> Bound:
    """A bound of the pipeline's `limits`, or (`under_load`) of its `slo`, which compare alone judges.

    Raises UsageError `metric-not-gated` for a metric that no check, or not compare, holds against a limit,
    and as `parse_bound`.
    """
    about = definition(name)
    if about.name in NEVER_BOUNDED or (under_load and about.name not in UNDER_LOAD):
        raise UsageError(
            "metric-not-gated",
            f"{name} cannot be {'a target under load' if under_load else 'limited'}",
            why="it is not measured under load" if under_load else "it is shown, and no check judges it",
            hint=f"one of {', '.join(sorted(UNDER_LOAD))}"
            if under_load
            else "deliver explain metric-not-gated",
        )
    return parse_bound(name, value)


def parse_bound(name: str, value: Any) -> Bound:
    """A bound from its written form. Raises UsageError `bad-limit`, `unknown-metric`."""
    direction = definition(name).direction
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = _number(name, value)
        if direction == "both":
            raise _bad(name, f"{name} can be wrong in both directions", "write {min: …, max: …}")
        return Bound(low=number) if direction == "higher" else Bound(high=number)
    if isinstance(value, dict) and value:
        for key in value:
            if key not in ("min", "max"):
                raise _bad(name, f"unknown key {key!r}", did_you_mean(str(key), ("min", "max")))
        sides = {k: _number(name, v) for k, v in value.items()}
        if len(sides) == 2 and sides["min"] > sides["max"]:
            raise _bad(name, f"nothing lies between {sides['min']:g} and {sides['max']:g}", "min ≤ max")
        return Bound(low=sides.get("min"), high=sides.get("max"))
    raise _bad(name, f"expected a number or {{min, max}}, got {value!r}", f"for example {name}: 1.1")


def _number(name: str, value: Any) -> float:
    """Finite numbers only: another bound would never be exceeded."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise _bad(name, f"expected a finite number, got {value!r}", f"for example {name}: 1.1")


def bound_for(limits: Mapping[str, Any], name: str) -> Bound | None:
    """The bound for a metric: its own, or that of the metric without its corpus."""
    for key in (name, definition(name).name):
        if key in limits:
            return parse_bound(key, limits[key])
    return None


def judge(name: str, value: float, limits: Mapping[str, Any]) -> Metric:
    """A metric judged by its absolute limit, or merely shown when it has none.

    A value that is not finite fails, limit or not.
    """
    about = definition(name)
    finite = value if math.isfinite(value) else INFINITE
    made = Metric(name=name, value=finite, unit=about.unit, direction=about.direction)
    bound = bound_for(limits, name)
    if bound is None:
        return made if math.isfinite(value) else replace(made, status=Verdict.FAIL.value)
    status = Verdict.PASS if bound.allows(value) else Verdict.FAIL
    return replace(made, limit=bound.beside(finite), status=status.value)


def _bad(name: str, why: str, hint: str) -> UsageError:
    return UsageError("bad-limit", f"the limit of {name} is not valid", why=why, hint=hint)
