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
    prefix = f"deliver_{report.check}"
    lines = _gauge(f"{prefix}_passed", f"Whether {report.check} lets a release be made", "1", report)
    if not report.verdict.releases:
        lines[-1] = f"{prefix}_passed 0"
    for metric in report.metrics:
        lines += _gauge(f"{prefix}_{metric.name}", words.title(metric.name), rounded(metric.value), report)
    return "\n".join([*lines, "# EOF"]) + "\n"


def rounded(value: float) -> str:
    """Three significant digits in plain notation where that is short."""
    text = f"{value:.{_DIGITS}g}"
    return f"{float(text):.0f}" if "e+" in text and abs(value) < 1e15 else text


def _gauge(name: str, help_text: str, value: str, report: Report) -> list[str]:
    clean = help_text.replace("\\", "\\\\").replace("\n", " ").replace('"', '\\"')
    return [f"# TYPE {name} gauge", f"# HELP {name} {clean}", f"{name} {value}"]
