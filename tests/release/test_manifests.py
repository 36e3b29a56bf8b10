"""Manifests against Kubernetes' own schemas, queries against the series that servers export."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from test_chart_rendering import OPTIONS, Helm, MakeSpec, of_kind, render

from delivery.release.chart import write_chart
from delivery.release.runtimes import RUNTIMES
from delivery.serving import metric_names

# The custom resources of a chart, as far as a chart uses them (Prometheus Operator, KEDA 2).
_CUSTOM: dict[str, Any] = json.loads((Path(__file__).parent / "custom_resources.json").read_text("utf-8"))
_KUBERNETES = "1.34"
_SERIES = re.compile(r"\b(?:deliver_\w+|(?:vllm|sglang|lmdeploy):\w+)")


def check(document: dict[str, Any]) -> None:
    """Raise where a manifest is not what its kind's schema says; unknown fields count."""
    schema = _CUSTOM.get(f"{document['apiVersion']}/{document['kind']}")
    if schema is None:
        kubernetes_validate.validate(document, _KUBERNETES, strict=True)
    else:
        import jsonschema

        jsonschema.validate(document, schema)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_manifests_are_valid(options: list[str], make_spec: MakeSpec, helm: Helm, tmp_path: Path) -> None:
    documents = render(helm, write_chart(make_spec(), tmp_path), *options)
    assert "Deployment" in {document["kind"] for document in documents}
    for document in documents:
        check(document)


def test_validation_sees_a_misspelt_field(make_spec: MakeSpec, helm: Helm, tmp_path: Path) -> None:
    documents = render(helm, write_chart(make_spec(), tmp_path))
    deployment = of_kind(documents, "Deployment")
    deployment["spec"]["template"]["spec"]["readOnlyRoot"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="readOnlyRoot"):
        check(deployment)
    monitor = of_kind(documents, "ServiceMonitor")
    monitor["spec"]["endpoints"][0]["intervall"] = "15s"
    with pytest.raises(Exception, match="intervall"):
        check(monitor)


def queries(documents: list[dict[str, Any]]) -> list[str]:
    """Every PromQL expression of the rules, the dashboard and the autoscaler."""
    rules = of_kind(documents, "PrometheusRule")["spec"]["groups"][0]["rules"]
    found = [rule["expr"] for rule in rules]
    for document in documents:
        if document["kind"] == "ScaledObject":
            found += [trigger["metadata"]["query"] for trigger in document["spec"]["triggers"]]
        if document["kind"] == "HorizontalPodAutoscaler":
            found += [metric["pods"]["metric"]["name"] for metric in document["spec"]["metrics"]]
        if document["kind"] == "ConfigMap" and document["metadata"]["name"].endswith("-dashboard"):
            board = json.loads(next(iter(document["data"].values())))
            found += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
            found += [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    return found


def exported_by_our_server() -> set[str]:
    """Sample names on /metrics of a server, with one sample of everything."""
    from delivery.serving.metrics import ServerMetrics

    text = ServerMetrics("tiny").render().decode()
    families = re.findall(r"^# TYPE (\S+) (\w+)", text, re.MULTILINE)
    names = {name for name, _ in families}
    return names | {f"{name}_bucket" for name, kind in families if kind == "histogram"}


def test_queries_name_only_what_the_server_exports(make_spec: MakeSpec, helm: Helm, tmp_path: Path) -> None:
    documents = render(helm, write_chart(make_spec(), tmp_path), "autoscaling.mode=keda")
    expressions = queries(documents)
    asked = {name for expression in expressions for name in _SERIES.findall(expression)}
    assert len(asked) >= 10
    assert asked <= exported_by_our_server()


def test_labels_in_queries_are_those_that_a_scrape_adds(
    make_spec: MakeSpec, helm: Helm, tmp_path: Path
) -> None:
    documents = render(helm, write_chart(make_spec(), tmp_path), "autoscaling.mode=keda")
    matched = {
        label
        for e in queries(documents)
        for braces in re.findall(r"{([^}]*)}", e)
        for label in re.findall(r"(\w+)=", braces)
    }
    grouped = {
        label
        for e in queries(documents)
        for inner in re.findall(r"by \(([^)]*)\)", e)
        for label in inner.split(",")
    }
    assert matched == {"namespace", "job"}
    assert grouped == {"le"}
    # The ServiceMonitor names no jobLabel, so the job is the Service's name.
    assert "jobLabel" not in of_kind(documents, "ServiceMonitor")["spec"]
    assert of_kind(documents, "Service")["metadata"]["name"] == "r-tiny"


@pytest.mark.parametrize("kind", list(RUNTIMES))
def test_each_runtime_is_asked_for_its_own_series(
    kind: str, make_spec: MakeSpec, helm: Helm, tmp_path: Path
) -> None:
    chart = write_chart(make_spec(runtime_kind=kind), tmp_path)
    documents = render(helm, chart, "autoscaling.mode=hpa")
    prefix = "deliver_" if kind == "deliver" else f"{kind}:"
    asked = {name for expression in queries(documents) for name in _SERIES.findall(expression)}
    assert asked
    assert all(name.startswith(prefix) for name in asked if ":" in name)


def test_the_four_alerts(make_spec: MakeSpec, helm: Helm, tmp_path: Path) -> None:
    rules = of_kind(render(helm, write_chart(make_spec(), tmp_path)), "PrometheusRule")["spec"]["groups"][0]
    by_name = {rule["alert"]: rule for rule in rules["rules"]}
    assert list(by_name) == ["ModelQueueLong", "ModelThroughputLow", "ModelKVCacheFull", "ModelDecodeSlow"]
    for rule in by_name.values():
        assert re.fullmatch(r"\d+m", rule["for"])
        assert rule["annotations"]["remedy"].strip()
    assert by_name["ModelQueueLong"]["expr"].endswith("> 50")
    assert "< 42.84 and" in by_name["ModelThroughputLow"]["expr"]  # 0.7 × 61.2 tokens/s
    assert by_name["ModelKVCacheFull"]["expr"].endswith("> 0.95")
    assert by_name["ModelDecodeSlow"]["expr"].endswith("> 1")


def test_without_a_measured_throughput_there_is_no_alert_on_it(
    make_spec: MakeSpec, helm: Helm, tmp_path: Path
) -> None:
    from delivery.release.measured import Measured

    rule = of_kind(render(helm, write_chart(make_spec(measured=Measured()), tmp_path)), "PrometheusRule")
    assert "ModelThroughputLow" not in [r["alert"] for r in rule["spec"]["groups"][0]["rules"]]


def test_metric_names_are_unique_and_ours() -> None:
    names = [v for k, v in vars(metric_names).items() if k.isupper() and not k.startswith("LABEL_")]
    assert len(names) == len(set(names))
    assert all(name.startswith("deliver_") for name in names)


@pytest.mark.apt
@pytest.mark.slow
def test_promtool_accepts_rules_and_behaves(
    make_spec: MakeSpec, helm: Helm, promtool: Path, tmp_path: Path
) -> None:
    """Syntax, and what fires when: an idle server does not, a slow one with a queue does."""
    rule = of_kind(render(helm, write_chart(make_spec(), tmp_path)), "PrometheusRule")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rule["spec"]["groups"]}), "utf-8")
    labels = '{namespace="default",job="r-tiny",pod="a"}'
    load = {
        f"deliver_requests_waiting{labels}": "60x40",
        f"deliver_generation_tokens_total{labels}": "0+600x40",  # 10 tokens/s
        f"up{labels}": "1x40",
        f"deliver_kv_usage_ratio{labels}": "0.99x40",
    }
    idle = dict.fromkeys(load, "0x40") | {f"up{labels}": "1x40"}

    def expecting(series: dict[str, str], fires: list[str]) -> dict[str, Any]:
        alerts = {r["alert"]: r for r in rule["spec"]["groups"][0]["rules"]}
        return {
            "interval": "1m",
            "input_series": [{"series": key, "values": values} for key, values in series.items()],
            "promql_expr_test": [
                {"expr": f"count({alerts[name]['expr']})", "eval_time": "30m", "exp_samples": samples}
                for name in ("ModelQueueLong", "ModelThroughputLow", "ModelKVCacheFull")
                for samples in ([{"labels": "{}", "value": 1}] if name in fires else [],)
            ],
        }

    fires = ["ModelQueueLong", "ModelThroughputLow", "ModelKVCacheFull"]
    tests = {"rule_files": ["rules.yaml"], "tests": [expecting(load, fires), expecting(idle, [])]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests), "utf-8")
    for arguments in (["check", "rules", "rules.yaml"], ["test", "rules", "tests.yaml"]):
        done = subprocess.run(
            [promtool, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
