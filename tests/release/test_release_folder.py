"""A whole release folder: complete, consistent, verifiable, and the same bytes each time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from delivery.artifact import Artifact, Kind, Manifest, hash_tree, write_manifest
from delivery.errors import DataError
from delivery.gate.report import Finding, Metric, Report, Verdict
from delivery.release.assemble import BOM, RUNBOOK, ReleaseSpec, write_release
from delivery.release.chart import ChartSpec, Image
from delivery.release.facts import licence_of
from delivery.release.index import ENVELOPE, INDEX, PROVENANCE, SUMS, read_index, verify_release
from delivery.release.measured import Measured
from delivery.release.signature import PUBLIC_KEY, SIGNATURE, SIGNED_BY, Signer, verify_envelope
from delivery.report import render

MakeSpec = Callable[..., ChartSpec]


def artifact(folder: Path, kind: Kind, step: str, files: dict[str, bytes], **inputs: str) -> Artifact:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    params = {"scheme": "awq-w4a16"} if step == "quantize" else {}
    return write_manifest(folder, Manifest(kind, step, 1, params, inputs, hash_tree(folder)))


@pytest.fixture
def ingredients(make_spec: MakeSpec, tmp_path: Path) -> Callable[..., ReleaseSpec]:
    checkpoint = artifact(tmp_path / "c", Kind.CHECKPOINT, "quantize", {"config.json": b"{}"})
    engine = artifact(
        tmp_path / "e",
        Kind.ENGINE,
        "build",
        {"engine.json": b"{}", "w/a.bin": b"w"},
        checkpoint=checkpoint.digest,
    )
    reports = []
    for check, metric in (
        ("smoke", Metric("load_s", 3.2, "s", "lower")),
        ("compare", Metric("tpot_p95_ms", 9.1, "ms", "lower", 1.15, "pass", 9.0, (0.98, 1.04))),
    ):
        report = Report(
            check,
            engine.digest,
            Verdict.BOOTSTRAPPED,
            (metric,),
            (Finding("warning", "baseline bootstrapped"),),
            details={"facts": {"torch": "2.13.0"}},
        )
        folder = tmp_path / check
        folder.mkdir()
        report.write(folder)
        render(report, folder)
        reports.append((report, artifact(folder, Kind.REPORT, check, {})))

    def make(**changes: object) -> ReleaseSpec:
        chart = make_spec(
            model_digest=engine.digest,
            files=engine.manifest.files,
            measured=Measured.of(r for r, _ in reports),
            **changes,
        )
        return ReleaseSpec(
            chart=chart,
            served=engine,
            reports=reports,
            materials=[engine, checkpoint],
            config={"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            licence="apache-2.0",
            libraries=["numpy", "no-such-distribution"],
            params={"runtime": "deliver"},
            commit="a" * 40,
            repository="https://git.example/models",
        )

    return make


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    path = tmp_path / "key.pem"
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return Signer.load(path)


@pytest.fixture
def release(ingredients: Callable[..., ReleaseSpec], signer: Signer, tmp_path: Path) -> Path:
    out = tmp_path / "release"
    out.mkdir()
    write_release(ingredients(), out, signer)
    return out


def tree(folder: Path) -> dict[str, str]:
    return {ref.path: ref.sha256 for ref in hash_tree(folder)}


def test_a_release_is_complete(release: Path) -> None:
    files = set(tree(release))
    assert files >= {
        *("tiny-1.2.3.tgz", "chart/tiny/Chart.yaml", "chart/tiny/files/model.sha256"),
        *("reports/smoke/report.json", "reports/compare/report.html", "reports/compare/junit.xml"),
        *(BOM, PROVENANCE, RUNBOOK, INDEX, SUMS, ENVELOPE, SIGNATURE, PUBLIC_KEY, SIGNED_BY),
        *("report.html", "summary.md"),
    }


def test_same_ingredients_same_bytes(
    ingredients: Callable[..., ReleaseSpec], signer: Signer, release: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    again.mkdir()
    write_release(ingredients(), again, signer)
    assert tree(again) == tree(release)


def test_an_ephemeral_key_changes_only_what_depends_on_it(
    ingredients: Callable[..., ReleaseSpec], tmp_path: Path
) -> None:
    trees = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_release(ingredients(), tmp_path / name, Signer.load(None))
        trees.append(tree(tmp_path / name))
    differ = {path for path in trees[0] if trees[0][path] != trees[1][path]}
    assert differ == {ENVELOPE, SIGNATURE, PUBLIC_KEY, SIGNED_BY}


def test_it_verifies_until_something_changes(release: Path, signer: Signer, tmp_path: Path) -> None:
    assert verify_release(release) == signer.key_id
    assert verify_release(release, signer.key.public_key()) == signer.key_id
    for name, damage in (
        ("chart/tiny/values.yaml", "changed"),
        ("reports/smoke/report.json", "missing"),
        ("chart/tiny/templates/extra.yaml", "not in the index"),
    ):
        copy = tmp_path / damage
        shutil.copytree(release, copy)
        if damage == "missing":
            (copy / name).unlink()
        else:
            (copy / name).write_text("x: 1\n", "utf-8")
        with pytest.raises(DataError, match=f"{name} is {damage}"):
            verify_release(copy)


@pytest.mark.parametrize("name", [SUMS, ENVELOPE, SIGNED_BY, PUBLIC_KEY, SIGNATURE, INDEX])
@pytest.mark.parametrize("damage", ["changed", "emptied", "missing"])
def test_the_files_about_the_signature_are_checked_too(
    release: Path, signer: Signer, name: str, damage: str
) -> None:
    """None of them is in what is signed; a manifest beside them is signed by nobody."""
    if damage == "missing":
        (release / name).unlink()
    else:
        (release / name).write_bytes(b"" if damage == "emptied" else (release / name).read_bytes() + b"x")
    for key in (None, signer.key.public_key()):
        with pytest.raises(DataError) as caught:
            verify_release(release, key)
        assert caught.value.code in ("release-damaged", "signature-invalid", "not-a-release")


def test_a_signature_of_another_key_over_the_provenance_is_noticed(release: Path) -> None:
    (release / ENVELOPE).write_bytes(Signer.load(None).envelope((release / PROVENANCE).read_bytes()))
    with pytest.raises(DataError, match="the provenance's signature does not verify"):
        verify_release(release)


def test_a_signed_statement_of_another_release_is_noticed(release: Path, signer: Signer) -> None:
    (release / ENVELOPE).write_bytes(signer.envelope(b"{}"))
    with pytest.raises(DataError, match=f"{ENVELOPE} does not belong to the signature") as caught:
        verify_release(release)
    assert "its statement is not provenance.json" in caught.value.why


def test_the_runbooks_commands_notice_a_changed_file_and_a_changed_list(release: Path, openssl: Path) -> None:
    environment = {**os.environ, "PATH": f"{openssl.parent}:{os.environ['PATH']}"}
    commands = (release / RUNBOOK).read_text("utf-8").partition("## Verify the release")[2].split("```")[1]

    def run() -> int:
        script = ["bash", "-e", "-c", commands]
        return subprocess.run(script, cwd=release, env=environment, capture_output=True).returncode

    assert run() == 0
    values = release / "chart" / "tiny" / "values.yaml"
    before = hashlib.sha256(values.read_bytes()).hexdigest()
    values.write_text("x: 1\n", "utf-8")
    assert run() != 0
    sums = (release / SUMS).read_text("utf-8")
    (release / SUMS).write_text(
        sums.replace(before, hashlib.sha256(values.read_bytes()).hexdigest()), "utf-8"
    )
    assert run() != 0


def test_something_else_is_no_release(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a release"):
        verify_release(tmp_path)
    (tmp_path / INDEX).write_text('{"schema": 99}', "utf-8")
    with pytest.raises(DataError, match="is not a release"):
        read_index(tmp_path)


def test_provenance_names_what_it_is_about_and_came_from(release: Path, signer: Signer) -> None:
    statement = json.loads((release / PROVENANCE).read_text("utf-8"))
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    archive = hashlib.sha256((release / "tiny-1.2.3.tgz").read_bytes()).hexdigest()
    assert statement["subject"] == [{"name": "tiny-1.2.3.tgz", "digest": {"sha256": archive}}]
    build = statement["predicate"]["buildDefinition"]
    names = [dependency["name"] for dependency in build["resolvedDependencies"]]
    assert names == ["weights", "engine/build", "checkpoint/quantize"]
    assert build["resolvedDependencies"][0]["digest"] == {"gitCommit": "a" * 40}
    assert build["resolvedDependencies"][2]["annotations"]["params"] == {"scheme": "awq-w4a16"}
    enveloped = verify_envelope((release / ENVELOPE).read_bytes(), signer.key.public_key())
    assert enveloped == (release / PROVENANCE).read_bytes()


def test_bill_of_materials_is_valid_and_has_the_gates_numbers(release: Path) -> None:
    text = (release / BOM).read_text("utf-8")
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"bomFormat"', '"format"')) is not None
    components = json.loads(text)["components"]
    model = components[0]
    assert model["type"] == "machine-learning-model"
    numbers = {m["type"]: m for m in model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]}
    assert numbers["load_s"]["value"] == "3.2 s"
    assert numbers["tpot_p95_ms"]["confidenceInterval"] == {"lowerBound": "0.98", "upperBound": "1.04"}
    assert [f["name"] for f in model["components"]] == ["engine.json", "w/a.bin"]
    assert "numpy" in {c["name"] for c in components if c["type"] == "library"}
    assert "no-such-distribution" not in text


def test_runbook_says_how_to_verify_and_what_is_missing(
    ingredients: Callable[..., ReleaseSpec], tmp_path: Path
) -> None:
    (tmp_path / "r").mkdir()
    spec = ingredients(image=Image.parse("deliver:0.1.0"))
    write_release(spec, tmp_path / "r", Signer.load(None))
    text = (tmp_path / "r" / RUNBOOK).read_text("utf-8")
    assert "The key was made for this release only" in text
    assert "by tag: packaged without a digest" in text
    assert "--set image.digest=sha256:DIGEST" in text
    for alert in ("ModelQueueLong", "ModelThroughputLow", "ModelKVCacheFull", "ModelDecodeSlow"):
        assert f"### {alert}\nSymptom: " in text
    assert "warning, smoke: baseline bootstrapped" in text


def test_chart_lists_the_files_that_were_gated(release: Path) -> None:
    sums = (release / "chart" / "tiny" / "files" / "model.sha256").read_text("utf-8")
    assert sums.splitlines()[0] == f"{hashlib.sha256(b'{}').hexdigest()}  engine.json"
    assert len(sums.splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "text", "licence"),
    [
        ("README.md", "---\nlanguage: en\nlicense: apache-2.0\n---\n# Model\n", "apache-2.0"),
        ("README.md", "# Model\nlicense: none\n", ""),
        ("LICENSE", "                 Apache License\n  Version 2.0", "Apache-2.0"),
        ("LICENSE.txt", "Our own terms", "LICENSE.txt"),
    ],
)
def test_licences_are_read_from_the_checkpoint(name: str, text: str, licence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, "utf-8")
    assert licence_of(tmp_path) == licence
