"""OpenMetrics text for `artifacts:reports:metrics`.

Values are rounded to three significant digits: a merge request then shows changes, not noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delivery.report import words

if TYPE_CHECKING:
    from delivery.gate.report import Report

_DIGITS = 3


def document(report: Report) -> str:
    """One gauge per metric and one for the verdict, ending with `# EOF`."""
    prefix = f"deliver_{name(report.check)}"
    lines = _gauge(f"{prefix}_passed", f"Whether {report.check} lets a release be made", "1")
    if not report.verdict.releases:
        lines[-1] = f"{prefix}_passed 0"
    taken = {"passed"}
    for metric in report.metrics:
        own = free = name(metric.name)
        while free in taken:  # of two corpora whose names differ in what a metric's name cannot hold
            free = f"{own}_{len(taken)}"
        taken.add(free)
        lines += _gauge(f"{prefix}_{free}", words.title(metric.name), rounded(metric.value))
    return "\n".join([*lines, "# EOF"]) + "\n"


def name(text: str) -> str:
    """What a metric's name may hold: letters, digits and underscores of ASCII; others as their numbers."""
    return "".join(
        c if c.isascii() and (c.isalnum() or c == "_") else "_" if c.isascii() else f"u{ord(c):x}"
        for c in text
    )


def rounded(value: float) -> str:
    """Three significant digits in plain notation where that is short."""
    text = f"{value:.{_DIGITS}g}"
    return f"{float(text):.0f}" if "e+" in text and abs(value) < 1e15 else text


def _gauge(gauge: str, help_text: str, value: str) -> list[str]:
    clean = help_text.replace("\\", "\\\\").replace("\n", " ").replace('"', '\\"')
    return [f"# TYPE {gauge} gauge", f"# HELP {gauge} {clean}", f"{gauge} {value}"]
