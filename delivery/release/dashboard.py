"""The Grafana dashboard of a release, drawn from the series that its server exports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delivery.release.runtimes import Series

Panel = dict[str, Any]

_TARGET = '{namespace="$namespace",job="$job"}'
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_SCHEMA_VERSION = 39


def dashboard(title: str, series: Series, baseline_tokens_per_s: float) -> dict[str, Any]:
    """Grafana's JSON model. Variables choose the datasource, the namespace and the job."""
    panels = [
        _panel(
            "Requests",
            "short",
            {"waiting": f"sum({series.waiting}{_TARGET})", "running": f"sum({series.running}{_TARGET})"},
        ),
        _panel("KV cache in use", "percentunit", {"{{pod}}": f"{series.kv_usage}{_TARGET}"}, threshold=0.95),
        _panel(
            "Tokens per second",
            "short",
            {
                "generated": f"sum(rate({series.generation_tokens}{_TARGET}[5m]))",
                "prompt": f"sum(rate({series.prompt_tokens}{_TARGET}[5m]))",
            },
            threshold=baseline_tokens_per_s or None,
        ),
        _quantiles("Time to first token", series.ttft_seconds),
        _quantiles("Between tokens", series.inter_token_seconds),
        _quantiles("Decode step", series.decode_seconds, threshold=1.0),
        _quantiles("Whole request", series.request_seconds),
    ]
    losses = {"cancelled": series.cancelled, "preempted": series.preemptions}
    queries = {name: f"sum(rate({metric}{_TARGET}[5m]))" for name, metric in losses.items() if metric}
    if queries:
        panels.append(_panel("Cancelled and preempted, per second", "short", queries))
    panels.append(_panel("Replicas up", "short", {"up": f"sum(up{_TARGET})"}))
    for number, panel in enumerate(panels):
        row, column = divmod(number, _COLUMNS)
        panel["id"] = number + 1
        panel["gridPos"] = {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
    return {
        "title": title,
        "tags": ["llm", "deliver"],
        "timezone": "browser",
        "schemaVersion": _SCHEMA_VERSION,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables(series)},
        "panels": panels,
    }


def _quantiles(title: str, histogram: str, threshold: float | None = None) -> Panel:
    rate = f"sum by (le) (rate({histogram}_bucket{_TARGET}[5m]))"
    queries = {f"P{p}": f"histogram_quantile({p / 100}, {rate})" for p in (50, 95, 99)}
    return _panel(title, "s", queries, threshold=threshold)


def _panel(title: str, unit: str, queries: dict[str, str], *, threshold: float | None = None) -> Panel:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if threshold is not None:
        steps.append({"color": "red", "value": threshold})
    return {
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "min": 0,
                "thresholds": {"mode": "absolute", "steps": steps},
                "custom": {"thresholdsStyle": {"mode": "line" if threshold is not None else "off"}},
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(queries.items())
        ],
    }


def _variables(series: Series) -> list[dict[str, Any]]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {
            "name": "namespace",
            "type": "query",
            "datasource": source,
            "query": f"label_values({series.running}, namespace)",
            "refresh": 2,
        },
        {
            "name": "job",
            "type": "query",
            "datasource": source,
            "query": f'label_values({series.running}{{namespace="$namespace"}}, job)',
            "refresh": 2,
        },
    ]
