"""The bill of materials: CycloneDX 1.6 with a model card that carries the gate's numbers."""

from __future__ import annotations

import uuid
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from delivery import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from delivery.artifact import Artifact, FileRef
    from delivery.gate.report import Metric, Report

_NAMESPACE = uuid.UUID("7d5f2f0e-3d8b-5b39-9a53-6f0a3a3b1c55")


def bill_of_materials(
    *,
    name: str,
    revision: str,
    engine: Artifact,
    materials: Sequence[Artifact],
    reports: Iterable[Report],
    config: Mapping[str, Any],
    licence: str,
    image: str,
    libraries: Iterable[str],
) -> dict[str, Any]:
    """The BOM of one release.

    config: the model's config.json. licence: an SPDX id, or empty when the checkpoint states none.
    libraries: distributions that shaped the output; those not installed are left out.
    """
    model_ref = f"model:{engine.digest}"
    model = _model(model_ref, name, revision, engine, reports, config, licence)
    sources = [_source(artifact) for artifact in materials if artifact.digest != engine.digest]
    packages = [p for p in map(_package, sorted(set(libraries))) if p]
    container = [{"type": "container", "bom-ref": f"image:{image}", "name": image}] if image else []
    components = [model, *sources, *packages, *container]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(_NAMESPACE, engine.digest).urn,
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "deliver", "version": __version__}]},
            "component": {"type": "application", "bom-ref": "release", "name": name, "version": revision},
        },
        "components": components,
        "dependencies": [
            {"ref": "release", "dependsOn": [model_ref, *(c["bom-ref"] for c in container)]},
            {"ref": model_ref, "dependsOn": [s["bom-ref"] for s in [*sources, *packages]]},
        ],
    }


def _model(
    ref: str,
    name: str,
    revision: str,
    engine: Artifact,
    reports: Iterable[Report],
    config: Mapping[str, Any],
    licence: str,
) -> dict[str, Any]:
    """The model as a component, with its model card and files."""
    model: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": ref,
        "name": name,
        "version": revision,
        "hashes": [{"alg": "SHA-256", "content": engine.digest}],
        "modelCard": {
            "modelParameters": {
                "task": "text-generation",
                "architectureFamily": str(config.get("model_type", "unknown")),
                "modelArchitecture": ", ".join(config.get("architectures") or ["unknown"]),
                "inputs": [{"format": "text"}],
                "outputs": [{"format": "text"}],
            },
            "quantitativeAnalysis": {
                "performanceMetrics": [
                    _performance(metric, report) for report in reports for metric in report.metrics
                ]
            },
        },
        "properties": _properties(engine),
        "components": [_file(file, ref) for file in engine.manifest.files],
    }
    if licence:
        model["licenses"] = [{"license": {"name": licence}}]
    return model


def _performance(metric: Metric, report: Report) -> dict[str, Any]:
    """One measured number; CycloneDX has values as text, and no field for a unit but the type's name."""
    out: dict[str, Any] = {
        "type": metric.name,
        "value": f"{metric.value:.6g} {metric.unit}".strip(),
        "slice": report.check,
    }
    if metric.interval is not None:
        low, high = metric.interval
        out["confidenceInterval"] = {"lowerBound": f"{low:.6g}", "upperBound": f"{high:.6g}"}
    return out


def _properties(artifact: Artifact) -> list[dict[str, str]]:
    return [
        {"name": f"deliver:{artifact.manifest.step}:{key}", "value": str(value)}
        for key, value in sorted(artifact.manifest.params.items())
    ]


def _file(ref: FileRef, owner: str) -> dict[str, Any]:
    return {
        "type": "file",
        "bom-ref": f"{owner}/{ref.path}",
        "name": ref.path,
        "hashes": [{"alg": "SHA-256", "content": ref.sha256}],
    }


def _source(artifact: Artifact) -> dict[str, Any]:
    return {
        "type": "data",
        "bom-ref": f"{artifact.kind}:{artifact.digest}",
        "name": f"{artifact.kind} made by {artifact.manifest.step}",
        "hashes": [{"alg": "SHA-256", "content": artifact.digest}],
        "properties": _properties(artifact),
    }


def _package(distribution: str) -> dict[str, Any] | None:
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return None
    purl = f"pkg:pypi/{distribution.lower()}@{found}"
    return {"type": "library", "bom-ref": purl, "name": distribution, "version": found, "purl": purl}
