"""Drawing: one function per kind of chart, from its JSON to HTML with an inline SVG."""

from __future__ import annotations

from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from delivery.report import words
from delivery.report.svg import Plot, css_of, label, legend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Spec = Mapping[str, Any]

_ROW = 30
_MAX_BAR_LABELS = 16


def draw(chart: Spec) -> str:
    """A `<figure>` for any chart of `report.charts`; an unknown kind is shown by its title alone."""
    kind = _KINDS.get(str(chart.get("kind")))
    body = kind(chart) if kind else ""
    return f"<figure><figcaption>{escape(str(chart.get('title', '')))}</figcaption>{body}</figure>"


def _distribution(chart: Spec) -> str:
    edges, series = chart["edges"], chart["series"]
    top = max((share for s in series for share in s["shares"]), default=1.0)
    plot = Plot(chart["title"], (edges[0], edges[-1]), (0.0, top * 1.25 * 100))
    plot.y_axis("% of requests")
    for index, one in enumerate(series):
        points = []
        for (left, right), share in zip(pairwise(edges), one["shares"], strict=True):
            points += [(plot.x(left), plot.y(share * 100)), (plot.x(right), plot.y(share * 100))]
        plot.path(points, f"area {css_of(index)}", close_to=plot.floor)
        plot.path(points, f"outline {css_of(index)}")
    for index, one in enumerate(series):
        at, height = plot.x(one["mark"]), 14 + 15 * index
        plot.line(at, height, at, plot.floor, f"mark {css_of(index)}")
        text = f"P{chart['percentile']:g} {words.amount(one['mark'], chart['unit'])}"
        side = ("end", -5) if at > plot.width * 0.6 else ("start", 5)
        plot.text(at + side[1], height + 10, text, f"mark-label {css_of(index)}", side[0])
    plot.x_axis(chart["unit"])
    return legend([s["name"] for s in series]) + plot.svg()


def _pairs(chart: Spec) -> str:
    rows = chart["rows"]
    values = [v for row in rows for v in (row["baseline"], row["candidate"])]
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = (high - low) * 0.1 or high * 0.1 or 1.0
    height = 54 + _ROW * len(rows)
    plot = Plot(
        chart["title"], (max(0.0, low - margin), high + margin), (0, max(len(rows), 1)), height=height
    )
    for number, row in enumerate(rows):
        at = plot.y(len(rows) - number - 0.5)
        plot.text(plot.left - 8, at + 4, f"pair {number + 1}", "tick", "end")
        plot.line(plot.left, at, plot.width - 16, at, "grid")
        ends = plot.x(row["baseline"]), plot.x(row["candidate"])
        plot.line(ends[0], at, ends[1], at, "worse" if ends[1] > ends[0] else "better")
        for x, side, css in ((ends[0], "baseline", "base"), (ends[1], "candidate", "cand")):
            plot.circle(x, at, f"dot {css}", f"{side} {words.amount(row[side], chart['unit'])}")
    plot.x_axis(chart["unit"])
    return legend(["baseline", "candidate"]) + plot.svg()


def _stack(chart: Spec) -> str:
    rows = chart["rows"]
    names = list(dict.fromkeys(part["name"] for row in rows for part in row["parts"]))
    scale, unit = _scale(max((sum(p["value"] for p in r["parts"]) for r in rows), default=1.0), chart["unit"])
    longest = max((sum(p["value"] for p in row["parts"]) / scale for row in rows), default=1.0)
    height = 54 + (_ROW + 8) * len(rows)
    plot = Plot(chart["title"], (0.0, longest * 1.02 or 1.0), (0, max(len(rows), 1)), height=height, left=90)
    for number, row in enumerate(rows):
        at = plot.y(len(rows) - number - 0.5)
        plot.text(plot.left - 8, at + 4, row["name"], "tick", "end")
        start = 0.0
        for part in row["parts"]:
            value = part["value"] / scale
            x, width = plot.x(start), plot.x(start + value) - plot.x(start)
            tip = f"{part['name']}: {words.amount(part['value'], chart['unit'])}"
            plot.rect(x, at - 12, width, 24, f"bar {css_of(names.index(part['name']))}", tip)
            start += value
    plot.x_axis(unit)
    return legend(names) + plot.svg()


def _bars(chart: Spec) -> str:
    categories, series = chart["categories"], chart["series"]
    values = [v for s in series for v in s["values"]]
    top = max([*values, chart["limit"] or 0.0, 0.0]) or 1.0
    plot = Plot(chart["title"], (0, max(len(categories), 1)), (min([*values, 0.0]), top * 1.15))
    plot.y_axis(chart["unit"])
    width = 0.8 / max(len(series), 1)
    every = max(1, -(-len(categories) // _MAX_BAR_LABELS))
    for number, category in enumerate(categories):
        for index, one in enumerate(series):
            value = one["values"][number]
            left = plot.x(number + 0.1 + index * width)
            tip = f"{category}, {one['name']}: {words.amount(value, chart['unit'])}"
            top_edge, foot = sorted((plot.y(value), plot.y(0.0)))
            plot.rect(left, top_edge, plot.x(width) - plot.x(0), foot - top_edge, f"bar {css_of(index)}", tip)
            if len(categories) * len(series) <= _MAX_BAR_LABELS:
                plot.text(left + (plot.x(width) - plot.x(0)) / 2, top_edge - 4, label(value), "value")
        if number % every == 0:
            plot.text(plot.x(number + 0.5), plot.floor + 17, str(category), "tick")
    plot.line(plot.left, plot.y(0.0), plot.width - 16, plot.y(0.0), "axis")
    if chart["limit"] is not None:
        plot.limit(chart["limit"], f"limit {label(chart['limit'])}")
    return (legend([s["name"] for s in series]) if len(series) > 1 else "") + plot.svg()


def _line(chart: Spec) -> str:
    labels, series = chart["labels"], chart["series"]
    values = [v for s in series for v in s["values"] if v is not None]
    top = max([*values, chart["limit"] or 0.0], default=1.0) or 1.0
    plot = Plot(chart["title"], (-0.5, max(len(labels) - 0.5, 0.5)), (0.0, top * 1.15))
    plot.y_axis(chart["unit"])
    for index, one in enumerate(series):
        points = [(plot.x(i), plot.y(v)) for i, v in enumerate(one["values"]) if v is not None]
        plot.path(points, f"outline {css_of(index)}")
        for i, value in enumerate(one["values"]):
            if value is not None:
                tip = f"{labels[i]}, {one['name']}: {words.amount(value, chart['unit'])}"
                plot.circle(plot.x(i), plot.y(value), f"dot {css_of(index)}", tip)
    every = max(1, -(-len(labels) // 8))
    for number, text in enumerate(labels):
        if number % every == 0:
            plot.text(plot.x(number), plot.floor + 17, str(text), "tick")
    plot.line(plot.left, plot.floor, plot.width - 16, plot.floor, "axis")
    if chart["limit"] is not None:
        plot.limit(chart["limit"], f"limit {label(chart['limit'])}")
    return legend([s["name"] for s in series]) + plot.svg()


def _scale(top: float, unit: str) -> tuple[float, str]:
    """Bytes are drawn in MiB or GiB, everything else as it is."""
    if unit != "bytes":
        return 1.0, unit
    return (float(2**30), "GiB") if top >= 2**30 else (float(2**20), "MiB")


_KINDS: dict[str, Callable[[Spec], str]] = {
    "distribution": _distribution,
    "pairs": _pairs,
    "stack": _stack,
    "bars": _bars,
    "line": _line,
}
