"""The first screen: what got worse, by how much, how sure that is, since when, how to see it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivery.report import words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delivery.gate.report import Metric, Report


@dataclass(frozen=True, slots=True)
class Headline:
    """`answers` are (question, answer) pairs in the order in which a person asks."""

    title: str
    verdict: str
    answers: tuple[tuple[str, str], ...]
    command: str


def headline(report: Report) -> Headline:
    """The headline of any report; a passed one is short."""
    answers: list[tuple[str, str]] = []
    bad = words.failing(report)
    told = [f.text for f in report.findings if f.severity == "error"]
    if bad:
        answers.append(("What", "; ".join(_what(m) for m in bad[:4]) + _more(len(bad) - 4)))
        answers += [("How much", text)] if (text := "; ".join(filter(None, map(_how_much, bad[:4])))) else []
        answers += [("How sure", text)] if (text := _how_sure(report, bad[0])) else []
    if told and (not bad or report.verdict.value in ("fail", "invalid")):
        answers.append(("Seen", " ".join(_sentence(t) for t in told[:5]) + _more(len(told) - 5)))
    if since := _since(report.details):
        answers.append(("Since", since))
    return Headline(
        title=f"{report.check} of {words.short(report.subject)}: {words.HEADINGS[report.verdict.value]}",
        verdict=report.verdict.value,
        answers=tuple(answers),
        command=str(report.details.get("reproduce", "")),
    )


def _what(metric: Metric) -> str:
    return f"{words.title(metric.name)} ({metric.name})"


def _how_much(metric: Metric) -> str:
    value = words.amount(metric.value, metric.unit)
    against = ""
    if metric.baseline is not None:
        against = f" against {words.amount(metric.baseline, metric.unit)}"
        if metric.baseline:
            against += f" ({(metric.value / metric.baseline - 1) * 100:+.1f} %)"
    bound = f", limit {words.limit(metric)}" if metric.limit is not None else ""
    return f"{value}{against}{bound}"


def _how_sure(report: Report, metric: Metric) -> str:
    if metric.interval is None or not metric.baseline:
        return str(report.details.get("sureness", ""))
    low, high = ((edge / metric.baseline - 1) * 100 for edge in metric.interval)
    runs = report.details.get("runs")
    measured = f", {runs}" if runs else ""
    return f"90 % interval of the change {low:+.1f} % to {high:+.1f} %{measured}"


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
