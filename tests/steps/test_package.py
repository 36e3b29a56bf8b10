"""package: a real (tiny) engine and its reports become a release, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from delivery.artifact import Artifact, Kind, Manifest, hash_tree, write_manifest
from delivery.engine import build
from delivery.errors import DataError, GateFailed, UsageError
from delivery.gate.report import Metric, Report, Verdict
from delivery.release import verify_release
from delivery.report import render
from delivery.steps.package import Package

CHECKS = ("smoke", "evaluate", "compare")
IMAGE = "registry.example/deliver@sha256:" + "ab" * 32


@dataclass
class Context:
    """Stands for the runner's context."""

    out: Path
    bound: dict[str, list[Artifact]]
    told: list[str] = field(default_factory=list)

    def input(self, role: str) -> Artifact:
        return self.bound[role][0]

    def inputs(self, role: str) -> list[Artifact]:
        return self.bound.get(role, [])

    def finding(self, severity: str, text: str) -> None:
        self.told.append(f"{severity}: {text}")


@pytest.fixture(scope="module")
def chain(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """A checkpoint and the engine built from it."""
    files = hash_tree(tiny_checkpoint)
    manifest = Manifest(Kind.CHECKPOINT, "quantize", 1, {"scheme": "awq-w4a16"}, {}, files)
    checkpoint = Artifact(tiny_checkpoint, manifest)
    folder = tmp_path_factory.mktemp("engine") / "engine"
    build(tiny_checkpoint, folder, device="cpu", checkpoint_digest=checkpoint.digest)
    inputs = {"checkpoint": checkpoint.digest}
    engine = write_manifest(folder, Manifest(Kind.ENGINE, "build", 1, {}, inputs, hash_tree(folder)))
    return {"checkpoint": checkpoint, "engine": engine}


Make = Callable[..., Context]


@pytest.fixture
def make(chain: dict[str, Artifact], tmp_path: Path) -> Make:
    """A context with reports about the engine; verdicts, subject and details as a test wants them."""

    def context(
        checks: tuple[str, ...] = CHECKS,
        verdict: str = "pass",
        subject: str = "",
        details: dict[str, Any] | None = None,
    ) -> Context:
        reports = []
        for check in checks:
            folder = tmp_path / f"{check}-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            metrics = {
                "smoke": (Metric("load_s", 30.0, "s", "lower"),),
                "compare": (
                    Metric("output_throughput", 120.0, "tok/s", "higher"),
                    Metric("request_throughput", 6.0, "req/s", "higher"),
                    Metric("process_bytes", 2.0 * 1024**3, "bytes", "both"),
                    Metric("kv_bytes", 64.0 * 1024**2, "bytes", "both"),
                ),
            }
            about = subject or chain["engine"].digest
            report = Report(check, about, Verdict(verdict), metrics.get(check, ()), details=details or {})
            report.write(folder)
            render(report, folder)
            reports.append(write_manifest(folder, Manifest(Kind.REPORT, check, 1, {}, {}, hash_tree(folder))))
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        bound = {"engine": [chain["engine"]], "report": reports, "ancestor": [chain["checkpoint"]]}
        return Context(out, bound)

    return context


def values_of(release: Path, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((release / "chart" / name / "values.yaml").read_text("utf-8"))
    return loaded


def test_a_release_is_made_and_verifies(make: Make, chain: dict[str, Artifact]) -> None:
    ctx = make()
    Package(model="models/Tiny_Llama", image=IMAGE, chart_version="2.0.1", commit="c" * 40).run(ctx)
    verify_release(ctx.out)
    index = json.loads((ctx.out / "index.json").read_text("utf-8"))
    assert index["name"] == "tiny-llama"
    assert index["chart"] == "tiny-llama-2.0.1.tgz"
    assert index["verdicts"] == dict.fromkeys(CHECKS, "pass")
    chart = yaml.safe_load((ctx.out / "chart" / "tiny-llama" / "Chart.yaml").read_text("utf-8"))
    assert chart["version"] == "2.0.1"
    assert chart["appVersion"] == "c" * 40
    assert chart["annotations"]["deliver.dev/engine"] == f"sha256:{chain['engine'].digest}"
    assert ctx.told == ["warning: signed with an ephemeral key, which proves no identity"]


def test_values_come_from_what_was_measured(make: Make, chain: dict[str, Artifact]) -> None:
    ctx = make()
    Package(model="tiny", image=IMAGE).run(ctx)
    values = values_of(ctx.out, "tiny")
    startup = values["probes"]["startup"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 150  # 5 × 30 s
    assert values["monitoring"]["rules"]["baselineTokensPerSecond"] == 120
    assert values["autoscaling"]["waitingRequests"] == 12  # 6 requests/s × 2 s
    about = json.loads(chain["engine"].file("engine.json").read_text("utf-8"))
    kv_mib = about["plan"]["kv_bytes"] / 2**20
    # 1.25 × (engine without its KV cache + KV cache + HTTP server) + /dev/shm, in steps of 256 MiB
    needed = (2048 - 64 + kv_mib + 512) * 1.25 + 256
    assert values["resources"]["requests"]["memory"] == f"{-(-needed // 256) * 256:.0f}Mi"
    series = (ctx.out / "chart" / "tiny" / "templates" / "_series.tpl").read_text("utf-8")
    assert f'"--cache-max-entry-count", "{about["plan"]["num_blocks"]}"' in series
    assert values["model"]["digest"] == f"sha256:{chain['engine'].digest}"
    assert values["gpu"]["count"] == 0
    assert values["image"]["digest"] == IMAGE.partition("@")[2]


def test_without_an_image_it_says_that_it_runs_by_tag(make: Make) -> None:
    ctx = make()
    Package(model="tiny").run(ctx)
    assert any("no image digest was given" in text for text in ctx.told)
    assert values_of(ctx.out, "tiny")["image"]["tag"] == "0.1.0"


def test_engines_that_may_not_be_released(make: Make) -> None:
    with pytest.raises(GateFailed, match="smoke does not allow a release"):
        Package(model="tiny").run(make(verdict="fail"))
    with pytest.raises(DataError, match="is about another engine"):
        Package(model="tiny").run(make(subject="f" * 64))
    with pytest.raises(UsageError, match="passed evaluate"):
        Package(model="tiny").run(make(checks=("smoke", "compare")))
    Package(model="tiny", require=["smoke"]).run(make(checks=("smoke",)))


def test_nothing_is_written_before_the_reports_are_admitted(make: Make) -> None:
    ctx = make(verdict="invalid")
    with pytest.raises(GateFailed, match="does not allow"):
        Package(model="tiny").run(ctx)
    assert list(ctx.out.iterdir()) == []


def test_another_runtime_serves_the_checkpoint_and_must_be_measured(
    make: Make, chain: dict[str, Artifact]
) -> None:
    with pytest.raises(DataError, match="served by vllm, which was not measured"):
        Package(model="tiny", runtime="vllm", image=IMAGE).run(make())
    ctx = make(details={"runtime": "vllm"})
    Package(model="tiny", runtime="vllm", image=IMAGE).run(ctx)
    assert values_of(ctx.out, "tiny")["model"]["digest"] == f"sha256:{chain['checkpoint'].digest}"
    sums = (ctx.out / "chart" / "tiny" / "files" / "model.sha256").read_text("utf-8")
    assert "config.json" in sums
    assert "engine.json" not in sums
    ctx = make(details={"runtime": "vllm"})
    ctx.bound["ancestor"] = []
    with pytest.raises(UsageError, match="serves a checkpoint, and none was given"):
        Package(model="tiny", runtime="vllm").run(ctx)


def test_a_check_that_a_pipeline_has_twice_keeps_both_reports(make: Make, tmp_path: Path) -> None:
    ctx = make((*CHECKS, "smoke", "compare"))
    Package(model="tiny", image=IMAGE).run(ctx)
    assert verify_release(ctx.out)
    names = {*CHECKS, "smoke-2", "compare-2"}
    assert {p.name for p in (ctx.out / "reports").iterdir()} == names
    assert set(json.loads((ctx.out / "index.json").read_text("utf-8"))["verdicts"]) == names
    runbook = (ctx.out / "RUNBOOK.md").read_text("utf-8")
    assert "| compare-2 | pass | `reports/compare-2/` |" in runbook
    assert "reports/smoke-2/report.html" in (ctx.out / "report.html").read_text("utf-8")


def test_parameters_are_checked_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="does not say which image"):
        Package(image="deliver:latest").check()
    with pytest.raises(UsageError, match="is not a valid chart version"):
        Package(chart_version="1.0").check()
    Package(image=IMAGE, chart_version="1.0.0-rc.1").check()
    for refused_by_helm in ("1.0.0-01", "1.0.0-a..b", "1.0.0-.", "99999999999999999999.0.0", "１.0.0"):
        with pytest.raises(UsageError, match="not a valid chart version"):
            Package(chart_version=refused_by_helm).check()


def test_the_provenance_knows_the_whole_chain_and_no_local_path(make: Make, tmp_path: Path) -> None:
    ctx = make()
    Package(model="tiny", image=IMAGE).run(ctx)
    text = (ctx.out / "provenance.json").read_text("utf-8")
    names = [d["name"] for d in json.loads(text)["predicate"]["buildDefinition"]["resolvedDependencies"]]
    assert names == ["engine/build", "checkpoint/quantize", *(f"report/{check}" for check in CHECKS)]
    for path in ctx.out.rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes(), path


def test_where_the_model_lay_is_not_in_the_release(
    make: Make, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    key = tmp_path / "key.pem"
    secret = Ed25519PrivateKey.generate()
    key.write_bytes(secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    made = []
    ctx = make()
    for place in ("here", "elsewhere"):
        model = tmp_path_factory.mktemp(place) / "my-model"
        model.mkdir()
        again = Context(tmp_path / place, ctx.bound)
        again.out.mkdir()
        Package(model=str(model), signing_key=str(key)).run(again)
        found = {p.relative_to(again.out): p.read_bytes() for p in again.out.rglob("*") if p.is_file()}
        assert not [path for path, content in found.items() if str(model.parent).encode() in content]
        made.append(found)
    assert made[0] == made[1]
    chart = yaml.safe_load(made[0][Path("chart/my-model/Chart.yaml")])
    assert chart["annotations"]["deliver.dev/model"] == "my-model"
