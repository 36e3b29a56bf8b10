"""Charts as values: plain JSON that goes into `Report.details["charts"]` and is drawn by `report.draw`.

Each constructor returns {"kind", "title", "unit", ...}; the numbers in it are the ones that are shown.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Chart = dict[str, Any]
_BINS = 40


def distribution(
    title: str, unit: str, samples: Mapping[str, Sequence[float]], percentile: float = 95.0
) -> Chart:
    """A histogram per series over common bins, with a percentile marked.

    samples: series name → values. The axis ends at the 99.5th percentile of all values, so that one
    straggler does not squeeze the rest; what lies beyond is counted in the last bin.
    """
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in samples.items() if len(values)}
    everything = np.concatenate(list(arrays.values())) if arrays else np.zeros(1)
    low, high = float(everything.min()), float(np.percentile(everything, 99.5))
    marks = {name: float(np.percentile(a, percentile)) for name, a in arrays.items()}
    high = max([high, *marks.values()])
    edges = np.linspace(low, high if high > low else low + 1.0, _BINS + 1)
    return {
        "kind": "distribution",
        "title": title,
        "unit": unit,
        "edges": _rounded(edges),
        "percentile": percentile,
        "series": [
            {
                "name": name,
                "shares": _rounded(np.histogram(np.clip(a, edges[0], edges[-1]), edges)[0] / a.size),
                "mark": _round(marks[name]),
            }
            for name, a in arrays.items()
        ],
    }


def pairs(title: str, unit: str, baseline: Sequence[float], candidate: Sequence[float]) -> Chart:
    """One row per run: where the baseline and the candidate stood."""
    rows = [{"baseline": _round(b), "candidate": _round(c)} for b, c in zip(baseline, candidate, strict=True)]
    return {"kind": "pairs", "title": title, "unit": unit, "rows": rows}


def stack(title: str, unit: str, rows: Mapping[str, Mapping[str, float]]) -> Chart:
    """Horizontal bars, each the sum of named parts; rows: bar name → part name → value."""
    return {
        "kind": "stack",
        "title": title,
        "unit": unit,
        "rows": [
            {"name": name, "parts": [{"name": part, "value": _round(v)} for part, v in parts.items()]}
            for name, parts in rows.items()
        ],
    }


def bars(
    title: str,
    unit: str,
    categories: Sequence[str],
    series: Mapping[str, Sequence[float]],
    limit: float | None = None,
) -> Chart:
    """Vertical bars, grouped by category; `limit` is drawn as a line."""
    return {
        "kind": "bars",
        "title": title,
        "unit": unit,
        "categories": list(categories),
        "series": [{"name": name, "values": [_round(v) for v in values]} for name, values in series.items()],
        "limit": limit,
    }


def line(
    title: str,
    unit: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    limit: float | None = None,
) -> Chart:
    """Values in order, such as a metric over the baseline's history; None leaves a gap."""
    return {
        "kind": "line",
        "title": title,
        "unit": unit,
        "labels": list(labels),
        "series": [
            {"name": name, "values": [None if v is None else _round(v) for v in values]}
            for name, values in series.items()
        ],
        "limit": limit,
    }


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """A table for `Report.details["tables"]`; cells are text or numbers."""
    return {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}


def _round(value: float) -> float:
    """Six significant digits; what is not finite becomes 0, since JSON cannot hold it."""
    return float(f"{value:.6g}") if math.isfinite(value) else 0.0


def _rounded(values: Any) -> list[float]:
    return [_round(float(v)) for v in values]
