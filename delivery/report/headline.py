"""The first screen: what got worse, by how much, how certain, since when, how to reproduce it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivery.gate.limits import INFINITE
from delivery.report import words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delivery.gate.report import Metric, Report


_SHOWN = 6
_COUNTED = ("weights_bytes", "bits_per_weight", "kv_tokens")
LEVEL = "90 %"
"""Of an interval, unless the report's `details` give another."""


@dataclass(frozen=True, slots=True)
class Worse:
    """One metric that decided against the subject, in words."""

    what: str
    name: str
    how_much: str
    how_sure: str
    limit: str

    def sentence(self) -> str:
        parts = (self.how_much, self.how_sure, f"limit {self.limit}" if self.limit else "")
        return f"{self.what} ({self.name}): {', '.join(p for p in parts if p)}"


@dataclass(frozen=True, slots=True)
class Headline:
    """What got worse, worst first, and (question, answer) pairs about all of it."""

    title: str
    verdict: str
    worse: tuple[Worse, ...]
    answers: tuple[tuple[str, str], ...]
    command: str

    @property
    def question(self) -> str:
        """What the list of metrics answers."""
        return "What got worse" if self.verdict in ("fail", "waived") else "What is not clear"


def headline(report: Report) -> Headline:
    """The headline of any report; a passed one is short."""
    answers: list[tuple[str, str]] = []
    bad = words.failing(report)
    errors = [f.text for f in report.findings if f.severity == "error" and not _said(f.text, bad)]
    if len(bad) > _SHOWN:
        answers.append(("And", ", ".join(m.name for m in bad[_SHOWN:])))
    if bad and (sureness := report.details.get("sureness") or report.details.get("runs")):
        answers.append(("Measured", f"{sureness}{_where(report.details)}"))
    if errors and (not bad or report.verdict.value in ("fail", "invalid")):
        answers.append(("Seen", " ".join(_sentence(t) for t in errors[:5]) + _more(len(errors) - 5)))
    if since := _since(report.details):
        answers.append(("Since", since))
    level = str(report.details.get("level", LEVEL))
    return Headline(
        title=f"{report.check} of {words.short(report.subject)}: {words.HEADINGS[report.verdict.value]}",
        verdict=report.verdict.value,
        worse=tuple(_worse(m, level) for m in bad[:_SHOWN]),
        answers=tuple(answers),
        command=str(report.details.get("reproduce", "")),
    )


def _where(details: Mapping[str, Any]) -> str:
    """The workload and the device of a measurement, as the facts tell them."""
    facts = details.get("facts", {})
    workload, device = facts.get("Workload"), str(facts.get("Device", "")).rpartition(" (")[0]
    return (f", workload {workload}" if workload else "") + (f", on {device}" if device else "")


def _worse(metric: Metric, level: str) -> Worse:
    value = words.amount(metric.value, metric.unit)
    how_much, how_sure = value, "counted, not sampled" if metric.name in _COUNTED else ""
    if abs(metric.value) >= INFINITE:
        return Worse(words.title(metric.name), metric.name, value, "", words.limit(metric))
    if not metric.baseline and metric.limit:
        how_much = f"{value}, {_beyond(metric.value / metric.limit)}"
    if metric.baseline:
        change = (metric.value / metric.baseline - 1) * 100
        how_much = f"{change:+.1f} %: {value} against {words.amount(metric.baseline, metric.unit)}"
        if metric.interval is not None:
            low, high = ((edge / metric.baseline - 1) * 100 for edge in metric.interval)
            how_sure = f"{level} interval {low:+.1f} % to {high:+.1f} %"
    return Worse(words.title(metric.name), metric.name, how_much, how_sure, words.limit(metric))


def _beyond(share: float) -> str:
    """A value relative to its limit; `share` is value / limit."""
    if share >= 3:
        return f"{words.number(float(round(share)))} times the limit"
    return f"{abs(share - 1) * 100:.3g} % {'over' if share > 1 else 'under'} the limit"


def _said(text: str, bad: Sequence[Metric]) -> bool:
    """Whether a finding repeats what the failed metrics say already."""
    return any(m.name in text or text.startswith(f"{words.title(m.name)} is ") for m in bad) and (
        "last release" not in text
    )


def _since(details: Mapping[str, Any]) -> str:
    """Where the comparison starts: the baseline's commit, engine, day and reason."""
    baseline = details.get("baseline")
    if not isinstance(baseline, dict):
        return ""
    start = f"commit {baseline['commit'][:12]}" if baseline.get("commit") else ""
    engine = f"engine {words.short(baseline['engine'])}" if baseline.get("engine") else ""
    day = f"recorded {baseline['recorded']}" if baseline.get("recorded") else ""
    reason = f"“{baseline['reason']}”" if baseline.get("reason") else ""
    said = ", ".join(part for part in (start, engine, day, reason) if part)
    commit = details.get("commit")
    return f"{said}; now commit {str(commit)[:12]}" if said and commit else said


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
