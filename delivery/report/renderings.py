"""`render`: writes every rendering of a report into a folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from delivery.report import html, junit, markdown, openmetrics

if TYPE_CHECKING:
    from pathlib import Path

    from delivery.gate.report import Report

RENDERINGS = ("junit.xml", "metrics.txt", "summary.md", "report.html", "charts.json")
"""The files that `render` writes next to `report.json`."""


def render(report: Report, out_dir: Path) -> None:
    """Write `RENDERINGS` into `out_dir`; equal reports give equal bytes."""
    for name, made in (
        ("junit.xml", junit.document(report)),
        ("metrics.txt", openmetrics.document(report)),
        ("summary.md", markdown.document(report)),
        ("report.html", html.document(report)),
    ):
        (out_dir / name).write_text(made, "utf-8", errors="replace")
    numbers: dict[str, Any] = {
        "check": report.check,
        "subject": report.subject,
        "charts": list(report.details.get("charts", ())),
        "tables": list(report.details.get("tables", ())),
    }
    text = json.dumps(numbers, indent=1, ensure_ascii=False, allow_nan=False)
    (out_dir / "charts.json").write_text(text + "\n", "utf-8", errors="backslashreplace")
