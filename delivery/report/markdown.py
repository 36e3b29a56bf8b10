"""The Markdown summary for a merge request's comment and a job's summary page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delivery.report import words
from delivery.report.headline import headline

if TYPE_CHECKING:
    from delivery.gate.report import Metric, Report

MAX_BYTES = 60_000
"""GitHub stops at 1 MB a job summary and 65,536 characters a comment."""
_MARKS = {
    "pass": "✅ pass",
    "bootstrapped": "🆕 baseline made",
    "waived": "⚠️ waived",
    "fail": "❌ fail",
    "inconclusive": "❔ inconclusive",
    "invalid": "❔ invalid",
    "shown": "",
}


def document(report: Report) -> str:
    """Headline, metrics and findings; cut at `MAX_BYTES` with a note."""
    top = headline(report)
    lines = [f"### {mark(report.verdict.value)} · {escape(top.title)}", ""]
    lines += [f"- **{escape(w.sentence())}**" for w in top.worse]
    lines += [f"- {question}: {escape(answer)}" for question, answer in top.answers]
    if top.command:
        lines += ["", "```sh", top.command.replace("```", ""), "```"]
    if report.metrics:
        lines += ["", "| metric | value | baseline | change | limit | status |", "|---|--:|--:|--:|--:|---|"]
        lines += [_row(m) for m in report.metrics]
    if report.findings:
        lines += ["", *(f"- {f.severity}: {escape(f.text)}" for f in report.findings)]
    lines += ["", f"<sub>subject `{words.short(report.subject)}`</sub>"]
    return cut("\n".join(lines) + "\n")


def escape(text: str) -> str:
    """Text as text: no table, link, emphasis, formula, mention or HTML can come out of a model's output."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    for mark in "\\`*_[]|#~$":
        flat = flat.replace(mark, f"\\{mark}")
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # A bare address would become a link.
    return flat.replace("@", "@\u200b").replace("://", ":\u200b//").replace("www.", "www\u200b.")


def _row(metric: Metric) -> str:
    base = "" if metric.baseline is None else words.amount(metric.baseline, metric.unit)
    cells = (
        f"`{metric.name}`",
        words.amount(metric.value, metric.unit),
        base,
        words.change(metric),
        words.limit(metric),
        mark(metric.status),
    )
    return "| " + " | ".join(cells) + " |"


def mark(status: str) -> str:
    """A verdict as people see it at once."""
    return _MARKS.get(status, status)


def cut(text: str) -> str:
    """The text, or as much as fits into `MAX_BYTES` and a note that says so."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= MAX_BYTES:
        return text
    note = "\n\n… cut here; the whole is in report.html\n"
    return encoded[: MAX_BYTES - len(note.encode())].decode(errors="ignore") + note
