"""The HTML report: one file without outside assets, readable in dark, in light and on paper."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from delivery.report import words
from delivery.report.draw import draw
from delivery.report.headline import LEVEL, headline

if TYPE_CHECKING:
    from delivery.gate.report import Metric, Report


_APART = re.compile(r"(?<=\d) (?=%|ms\b|[KMGT]iB\b|req/s|tok/s)|(?<=[≤≥]) ")
"""A number and its unit, which no line break should part."""


def document(report: Report) -> str:
    """The whole page. Everything in it is escaped: model outputs are hostile text."""
    return _template().render(
        report=report,
        top=headline(report),
        rows=[_row(m) for m in report.metrics],
        charts=[Markup(draw(chart)) for chart in report.details.get("charts", ())],
        tables=report.details.get("tables", ()),
        facts=_facts(report),
        short=words.short,
        level=report.details.get("level", LEVEL),
    )


def _row(metric: Metric) -> dict[str, str]:
    base = "" if metric.baseline is None else words.amount(metric.baseline, metric.unit)
    return {
        "name": metric.name,
        "title": words.title(metric.name),
        "value": words.amount(metric.value, metric.unit),
        "baseline": base,
        "change": words.change(metric),
        "limit": words.limit(metric),
        "status": metric.status,
    }


def _facts(report: Report) -> list[tuple[str, str]]:
    """Versions, settings and the device: shown, not judged."""
    facts = report.details.get("facts", {})
    return [(str(name), str(value)) for name, value in facts.items()]


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("delivery.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["whole"] = lambda text: _APART.sub("\u00a0", text)
    return environment.get_template("report.html.j2")
