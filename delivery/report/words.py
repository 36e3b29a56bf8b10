"""How numbers and verdicts are written in every rendering."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delivery.errors import UsageError
from delivery.gate.limits import INFINITE
from delivery.gate.metrics import definition

if TYPE_CHECKING:
    from delivery.gate.report import Metric, Report

HEADINGS = {
    "pass": "Passed",
    "fail": "Failed",
    "inconclusive": "Inconclusive",
    "invalid": "Invalid measurement",
    "bootstrapped": "Passed, with a baseline made from this very measurement",
    "waived": "Failed, and waived",
}
_COUNTED = ("outputs", "prompts", "tokens", "turns")
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float) -> str:
    """Four significant digits; thousands apart, no exponent between 0.001 and a million."""
    if abs(value) >= INFINITE:
        return "not finite"
    if abs(value) >= 1e15 or 0 < abs(value) < 1e-3:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.4g}"
    return text if "e" not in text else f"{value:.6f}".rstrip("0")


def amount(value: float, unit: str) -> str:
    """A value with its unit: bytes in binary units, shares in per cent."""
    if abs(value) >= INFINITE:
        return number(value)
    if unit == "bytes":
        for name in _BYTE_UNITS:
            if abs(value) < 1024 or name == _BYTE_UNITS[-1]:
                return f"{number(value)} {name}"
            value /= 1024
    if unit == "ratio":
        return f"{number(value * 100)} %"
    if value == 1 and unit in _COUNTED:
        unit = unit.removesuffix("s")
    return f"{number(value)} {unit}".rstrip()


def title(name: str) -> str:
    """A metric's name in words; with its corpus in front where it has one."""
    try:
        about = definition(name)
    except UsageError:
        return name.replace("_", " ")
    corpus = name.removesuffix(about.name).strip("_")
    return f"{about.title} ({corpus.replace('_', ' ')})" if corpus else about.title


def change(metric: Metric) -> str:
    """The change against the baseline in per cent, with its interval where there is one."""
    if metric.baseline is None or metric.baseline == 0 or abs(metric.value) >= INFINITE:
        return ""
    text = f"{(metric.value / metric.baseline - 1) * 100:+.1f} %"
    if metric.interval is not None:
        low, high = ((edge / metric.baseline - 1) * 100 for edge in metric.interval)
        text += f" [{low:+.1f}, {high:+.1f}]"
    return text


def limit(metric: Metric) -> str:
    """The limit with the sign that a person expects of it."""
    return "" if metric.limit is None else _sign(metric, metric.limit) + amount(metric.limit, metric.unit)


def _sign(metric: Metric, limit: float) -> str:
    """≤ or ≥: a bound can be on either side of any metric, and the verdict tells on which."""
    bad = metric.status in ("fail", "waived")
    judged_alone = metric.status == "pass" and metric.baseline is None
    if (bad or judged_alone) and metric.value != limit and abs(metric.value) < INFINITE:
        return "≤ " if (metric.value < limit) != bad else "≥ "
    if metric.direction == "both" and metric.baseline is not None:
        return "≤ " if limit > metric.baseline else "≥ "  # the side that the value left, or would
    return "≥ " if metric.direction == "higher" else "≤ "


def short(digest: str) -> str:
    return digest[:12]


def failing(report: Report) -> list[Metric]:
    """The metrics that decided against the subject, the worst against its limit first."""
    bad = [m for m in report.metrics if m.status in ("fail", "invalid", "inconclusive", "waived")]
    return sorted(bad, key=_excess, reverse=True)


def _excess(metric: Metric) -> float:
    if not metric.limit:
        return abs(metric.value)
    over = metric.value / metric.limit
    return 1 / over if metric.value < metric.limit and over > 0 else over
