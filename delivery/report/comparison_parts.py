"""What goes into the verdict of compare: settings, the reference, and the judgements that make it up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from delivery.gate.report import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delivery.gate.record import RequestRecord
    from delivery.gate.report import Finding, Metric


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line or the pipeline says about judging; ratios and shares of 1."""

    limit: float
    memory_limit: float
    memory_floor_bytes: int
    foreign_limit: float
    self_test: bool = False
    partner_named: bool = False
    """Whether the user named the engine that ran side by side; otherwise it was the baseline's."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the command that measures this again."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the judgements that make up the whole."""

    verdict: Verdict = Verdict.PASS
    metrics: Sequence[Metric] = ()
    findings: Sequence[Finding] = ()


@dataclass(frozen=True, slots=True)
class Reference:
    """What the candidate is compared with; `paired` runs were interleaved with the candidate's."""

    runs: Sequence[Sequence[RequestRecord]]
    memory: Mapping[str, float]
    paired: bool
    origin: Mapping[str, str]
    """Engine, commit, day and reason, for the headline."""
    capacity: float | None = None
    """Requests/s that it can sustain, where that was measured."""
