"""One page for the whole release: the judgements of all its checks together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delivery.gate.report import Finding, Report, worst

if TYPE_CHECKING:
    from collections.abc import Mapping


def overview(subject: str, judgements: Mapping[str, Report], facts: dict[str, Any]) -> Report:
    """A report about the release of `subject`, made of the reports that let it pass, each by its folder."""
    reports = list(judgements.values())
    checks = {
        "title": "Checks",
        "columns": ["check", "verdict", "metrics", "page"],
        "rows": [
            [name, r.verdict.value, len(r.metrics), f"reports/{name}/report.html"]
            for name, r in judgements.items()
        ],
    }
    details: dict[str, Any] = {
        "facts": {**facts, **{k: v for r in reports for k, v in r.details.get("facts", {}).items()}},
        "tables": [checks, *(table for r in reports for table in r.details.get("tables", ()))],
        "charts": [chart for r in reports for chart in r.details.get("charts", ())],
    }
    return Report(
        check="release",
        subject=subject,
        verdict=worst([r.verdict for r in reports]),
        metrics=tuple(metric for r in reports for metric in r.metrics),
        findings=tuple(Finding(f.severity, f"{r.check}: {f.text}") for r in reports for f in r.findings),
        details=details,
    )
