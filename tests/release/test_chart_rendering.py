"""The chart in the hands of the real helm: it lints, renders, and refuses what it should."""

from __future__ import annotations

import compileall
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from delivery.errors import UsageError
from delivery.release import chart as chart_module
from delivery.release.archive import write_chart_archive
from delivery.release.chart import ChartSpec, Hardware, Image, chart_name, write_chart
from delivery.release.measured import Measured
from delivery.release.runtimes import RUNTIMES

Helm = Callable[..., subprocess.CompletedProcess[str]]
MakeSpec = Callable[..., ChartSpec]

DIGEST = "sha256:" + "ef" * 32
OPTIONS = {
    "as it comes": [],
    "keda, model over http": [
        "autoscaling.mode=keda",
        "model.source=http",
        "model.http.url=https://models.example/tiny",
        "model.http.existingSecret=token",
    ],
    "hpa, model in an image, oauth2": [
        "autoscaling.mode=hpa",
        "model.source=image",
        "model.image.repository=registry.example/model",
        f"model.image.digest={DIGEST}",
        "ingress.enabled=true",
        "ingress.host=chat.example",
        "ingress.tlsSecretName=tls",
        "ingress.oauth2.enabled=true",
        "ingress.oauth2.issuerUrl=https://issuer.example",
        "ingress.oauth2.existingSecret=oauth2",
        f"ingress.oauth2.image.digest={DIGEST}",
    ],
    "s3, two gpus, more env": [
        "model.source=s3",
        "model.s3.uri=s3://bucket/tiny",
        "model.s3.existingSecret=s3",
        "model.s3.image.repository=registry.example/aws-cli",
        f"model.s3.image.digest={DIGEST}",
        "gpu.count=2",
        "gpu.runtimeClassName=nvidia",
        "extraEnv[0].name=FOO",
        "extraEnv[0].value=bar",
        "strategy.type=Recreate",
    ],
    "no authentication": ["auth.enabled=false", "model.verify=false", "model.pvc.subPath=a/b"],
}


def sets(options: list[str]) -> list[str]:
    return [word for option in options for word in ("--set", option)]


def render(helm: Helm, chart: Path, *options: str) -> list[dict[str, Any]]:
    done = helm("template", "r", chart, *sets(list(options)))
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    found = [document for document in documents if document["kind"] == kind]
    assert len(found) == 1, [d["kind"] for d in documents]
    return found[0]


def pod_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    deployments = [d for d in documents if d["kind"] == "Deployment"]
    server = next(
        d for d in deployments if d["metadata"]["labels"]["app.kubernetes.io/component"] == "server"
    )
    pod: dict[str, Any] = server["spec"]["template"]["spec"]
    return pod


@pytest.fixture
def chart(make_spec: MakeSpec, tmp_path: Path) -> Path:
    return write_chart(make_spec(), tmp_path)


@pytest.mark.parametrize("kind", list(RUNTIMES))
def test_helm_lints_the_archive(kind: str, make_spec: MakeSpec, helm: Helm, tmp_path: Path) -> None:
    archive = tmp_path / "tiny-1.2.3.tgz"
    write_chart_archive(write_chart(make_spec(runtime_kind=kind, max_model_len=2048), tmp_path), archive)
    done = helm("lint", "--strict", archive)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option_keeps_the_house_rules(options: list[str], chart: Path, helm: Helm) -> None:
    documents = render(helm, chart, *options)
    pods = [
        d["spec"]["template"]["spec"] if d["kind"] == "Deployment" else d["spec"]
        for d in documents
        if d["kind"] in ("Deployment", "Pod")
    ]
    assert len(pods) >= 2
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert "@sha256:" in container["image"]
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory", "ephemeral-storage"} <= container["resources"]["requests"].keys()
            assert {"memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()
            names = [variable["name"] for variable in container.get("env", [])]
            assert len(names) == len(set(names))
    server = pod_of(documents)["containers"][0]
    model = next(m for m in server["volumeMounts"] if m["name"] == "model")
    assert model["readOnly"] is True


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_selectors_match_the_pods_that_they_mean(options: list[str], chart: Path, helm: Helm) -> None:
    documents = render(helm, chart, *options)
    deployments = {d["metadata"]["name"]: d for d in documents if d["kind"] == "Deployment"}
    labels = {name: d["spec"]["template"]["metadata"]["labels"] for name, d in deployments.items()}
    for name, deployment in deployments.items():
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels[name].items()
    for document in documents:
        if document["kind"] == "Service":
            selected = [n for n, own in labels.items() if document["spec"]["selector"].items() <= own.items()]
            assert selected == [document["metadata"]["name"]]
        if document["kind"] in ("PodDisruptionBudget", "NetworkPolicy"):
            key = "selector" if document["kind"] == "PodDisruptionBudget" else "podSelector"
            wanted = document["spec"][key]["matchLabels"]
            assert [n for n, own in labels.items() if wanted.items() <= own.items()] == ["r-tiny"]


def test_names_of_digits_and_words_of_yaml_stay_names(chart: Path, helm: Helm) -> None:
    """`123` is a good name of a Secret, `no` one of a release; YAML reads them as something else."""
    given = {
        "auth.existingSecret": "123",
        "model.pvc.claimName": "456",
        "model.pvc.subPath": "7",
        "image.pullSecrets[0]": "89",
        "gpu.runtimeClassName": "true",
        "topologySpread.topologyKey": "5",
        "fullnameOverride": "no",
        "nameOverride": "1",
        "ingress.className": "9",
        "ingress.tlsSecretName": "10",
        "ingress.oauth2.existingSecret": "11",
    }
    words = [word for name, value in given.items() for word in ("--set-string", f"{name}={value}")]
    words += sets(["ingress.enabled=true", "ingress.host=h", "ingress.oauth2.enabled=true"])
    words += sets(["ingress.oauth2.issuerUrl=https://i", f"ingress.oauth2.image.digest={DIGEST}"])
    done = helm("template", "12", chart, *words)
    assert done.returncode == 0, done.stderr

    def walk(node: Any, at: str) -> None:
        if isinstance(node, dict):
            for key, child in node.items():
                walk(child, f"{at}.{key}")
        elif isinstance(node, list):
            for child in node:
                walk(child, at)
        elif at.endswith(("name", "Name", "subPath", "topologyKey")) or ".labels." in at:
            assert isinstance(node, str), f"{at} is {node!r}"

    for document in yaml.safe_load_all(done.stdout):
        walk(document, document["kind"])


def test_a_release_whose_name_cannot_name_a_service_is_refused(chart: Path, helm: Helm) -> None:
    done = helm("template", "1st", chart)
    assert done.returncode != 0
    assert "set fullnameOverride" in done.stderr
    assert helm("template", "1st", chart, "--set", "fullnameOverride=first").returncode == 0


def test_labels_and_annotations_of_ones_own_never_stand_twice(chart: Path, helm: Helm) -> None:
    """YAML with a key twice is refused by a strict API server; selectors need the chart's own values."""
    label = r"app\.kubernetes\.io/name=mine"
    own = [f"podLabels.{label}", "podLabels.team=a", r"podAnnotations.deliver\.dev/model-digest=x"]
    own += [f"monitoring.{part}.labels.{label}" for part in ("serviceMonitor", "rules", "dashboard")]
    done = helm("template", "r", chart, *sets(own))
    assert done.returncode == 0, done.stderr

    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader: Strict, node: yaml.MappingNode) -> dict[str, Any]:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), keys
        return loader.construct_mapping(node, deep=True)

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    documents = [d for d in yaml.load_all(done.stdout, Strict) if d]
    template = of_kind(documents, "Deployment")["spec"]["template"]["metadata"]
    assert template["labels"]["app.kubernetes.io/name"] == "tiny"
    assert template["labels"]["team"] == "a"
    assert template["annotations"]["deliver.dev/model-digest"].startswith("sha256:")
    assert of_kind(documents, "ServiceMonitor")["metadata"]["labels"]["app.kubernetes.io/name"] == "tiny"


def test_exactly_one_autoscaler(chart: Path, helm: Helm) -> None:
    kinds = ("HorizontalPodAutoscaler", "ScaledObject")
    for mode, expected in (("none", []), ("hpa", [kinds[0]]), ("keda", [kinds[1]])):
        documents = render(helm, chart, f"autoscaling.mode={mode}")
        assert [d["kind"] for d in documents if d["kind"] in kinds] == expected
        deployment = of_kind(documents, "Deployment")
        # A replica count beside an autoscaler would undo its decision on every upgrade.
        assert ("replicas" in deployment["spec"]) == (mode == "none")


def test_autoscaler_thresholds_come_from_the_measurement(chart: Path, helm: Helm) -> None:
    scaled = of_kind(render(helm, chart, "autoscaling.mode=keda"), "ScaledObject")
    waiting, usage = (trigger["metadata"] for trigger in scaled["spec"]["triggers"])
    assert waiting["query"] == 'sum(deliver_requests_waiting{namespace="default",job="r-tiny"})'
    assert waiting["threshold"] == "15"  # 7.7 requests/s × 2 s
    assert usage["threshold"] == "0.8"


def test_gpus_are_asked_for_and_limited_alike(make_spec: MakeSpec, helm: Helm, tmp_path: Path) -> None:
    chart = write_chart(make_spec(hardware=Hardware("NVIDIA H200", gpus=1)), tmp_path)
    documents = render(helm, chart)
    pod = pod_of(documents)
    resources = pod["containers"][0]["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "1"
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    rolling = of_kind(documents, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": 0, "maxUnavailable": 1}


def test_startup_budget_follows_the_measured_load_time(
    make_spec: MakeSpec, helm: Helm, tmp_path: Path
) -> None:
    for load_s, seconds in ((3.2, 60), (100.0, 500), (None, 1800)):
        folder = tmp_path / str(load_s)
        pod = pod_of(render(helm, write_chart(make_spec(measured=Measured(load_s=load_s)), folder)))
        probe = pod["containers"][0]["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == seconds


def test_grace_period_outlasts_the_drain(chart: Path, helm: Helm) -> None:
    pod = pod_of(render(helm, chart))
    server = pod["containers"][0]
    drain_s = int(server["args"][server["args"].index("--drain-timeout") + 1])
    pre_stop_s = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert drain_s >= 300
    assert pre_stop_s + drain_s < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("model.sorce=pvc", "sorce"),
        ("image.digest=sha256:abc", "digest"),
        ("image.tag=v1", "tag"),
        ("runtime.kind=vllm", "kind"),
        ("autoscaling.mode=both", "mode"),
        ("replicas=two", "replicas"),
        ("podSecurity.runAsUser=0", "runAsUser"),
        ("monitoring.rules.throughputDropRatio=1", "throughputDropRatio"),
        ("monitoring.rules.kvUsageRatio=1", "kvUsageRatio"),
    ],
)
def test_values_are_checked(option: str, told: str, chart: Path, helm: Helm) -> None:
    done = helm("template", "r", chart, "--set", option)
    assert done.returncode != 0
    assert told in done.stderr


def test_every_object_of_the_schema_is_closed(make_spec: MakeSpec, tmp_path: Path) -> None:
    schema = json.loads((write_chart(make_spec(), tmp_path) / "values.schema.json").read_text("utf-8"))
    open_on_purpose = {"affinity", "global", "valueFrom", "items"}

    def walk(node: Any, name: str) -> None:
        if isinstance(node, dict):
            if "properties" in node:
                assert node["additionalProperties"] is False, name
            elif node.get("type") == "object":
                assert "additionalProperties" in node or name in open_on_purpose, name
            for key, child in node.items():
                walk(child, key)

    walk(schema, "")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["extraEnv[0].name=HOME", "extraEnv[0].value=/x"], "HOME is set twice"),
        (["model.source=http"], "model.http.url is not set"),
        (["model.source=image", "model.image.repository=r"], "model.image.digest is not set"),
        (["ingress.enabled=true"], "ingress.host is not set"),
        (["drain.preStopSeconds=400"], "leaves no time after drain.preStopSeconds 400"),
        (["autoscaling.mode=hpa", "autoscaling.minReplicas=5"], "minReplicas 5 is more than"),
        (["autoscaling.mode=keda", "autoscaling.minReplicas=5"], "minReplicas 5 is more than"),
        (["strategy.maxSurge=0", "strategy.maxUnavailable=0"], "no pod could ever be replaced"),
        (["fullnameOverride=1st"], "1st cannot name a Service"),
    ],
)
def test_contradictions_are_refused(options: list[str], told: str, chart: Path, helm: Helm) -> None:
    done = helm("template", "r", chart, *sets(options))
    assert done.returncode != 0
    assert told in done.stderr


def test_image_volume_needs_a_cluster_that_has_it(chart: Path, helm: Helm) -> None:
    options = sets(["model.source=image", "model.image.repository=r", f"model.image.digest={DIGEST}"])
    done = helm("template", "r", chart, "--kube-version", "1.32.0", *options)
    assert "needs Kubernetes 1.33 or newer" in done.stderr
    assert helm("template", "r", chart, "--kube-version", "1.33.0", *options).returncode == 0


def test_an_image_by_tag_is_marked(make_spec: MakeSpec, helm: Helm, tmp_path: Path) -> None:
    chart = write_chart(make_spec(image=Image.parse("deliver:0.1.0")), tmp_path)
    assert pod_of(render(helm, chart))["containers"][0]["image"] == "deliver:0.1.0"
    by_digest = pod_of(render(helm, chart, f"image.digest={DIGEST}"))["containers"][0]["image"]
    assert by_digest == f"deliver@{DIGEST}"
    assert helm("template", "r", chart, "--set", "image.tag=latest").returncode != 0
    notes = (chart / "templates" / "NOTES.txt").read_text("utf-8")
    assert "runs {{ .Values.image.repository }} by tag" in notes


@pytest.mark.parametrize("text", ["deliver", "deliver:latest", "deliver@sha256:12", "a b:1", ""])
def test_image_references_are_checked(text: str) -> None:
    with pytest.raises(UsageError, match="does not say which image"):
        Image.parse(text)


def test_compiled_scripts_stay_out(make_spec: MakeSpec, tmp_path: Path) -> None:
    """An image is made with its Python files compiled; the chart's scripts are among them."""
    template = tmp_path / "template"
    shutil.copytree(chart_module._TEMPLATE, template)
    assert compileall.compile_dir(template / "files", quiet=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chart_module, "_TEMPLATE", template)
        made = write_chart(make_spec(), tmp_path / "made")
    assert not list(made.rglob("*.pyc"))


def test_chart_names_fit_kubernetes() -> None:
    assert chart_name("SmolLM2-135M_Instruct.Q4") == "smollm2-135m-instruct-q4"
    assert chart_name("7B") == "model-7b"
    assert len(chart_name("x" * 100)) == 40
