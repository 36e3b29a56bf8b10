"""Writing a release: chart, archive, reports, bill of materials, provenance, runbook, index, signature."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivery.artifact import hash_file, place
from delivery.release.archive import write_chart_archive
from delivery.release.bom import bill_of_materials
from delivery.release.chart import write_chart
from delivery.release.index import ENVELOPE, INDEX, PROVENANCE, write_index
from delivery.release.overview import overview
from delivery.release.provenance import provenance
from delivery.release.runbook import runbook
from delivery.report import html, markdown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from delivery.artifact import Artifact
    from delivery.gate.report import Report
    from delivery.release.chart import ChartSpec
    from delivery.release.signature import Signer

BOM = "bom.cdx.json"
RUNBOOK = "RUNBOOK.md"


@dataclass(frozen=True)
class ReleaseSpec:
    """The contents of a release.

    served: the artifact whose files the server loads. reports: judgements with the artifacts that
    hold them. materials: every artifact that went in, for provenance and bill of materials.
    """

    chart: ChartSpec
    served: Artifact
    reports: Sequence[tuple[Report, Artifact]]
    materials: Sequence[Artifact]
    config: Mapping[str, Any]
    licence: str
    libraries: Sequence[str]
    params: Mapping[str, Any]
    commit: str = ""
    repository: str = ""


def write_release(spec: ReleaseSpec, out: Path, signer: Signer) -> None:
    """Write the release into `out`. All but the files that depend on the key is reproducible."""
    chart = spec.chart
    chart_dir = write_chart(chart, out / "chart")
    archive = out / f"{chart.name}-{chart.version}.tgz"
    write_chart_archive(chart_dir, archive)
    judgements = {
        folder: report for folder, (report, _) in zip(_folders(spec.reports), spec.reports, strict=True)
    }
    for folder, (_, artifact) in zip(judgements, spec.reports, strict=True):
        for ref in artifact.manifest.files:
            place(artifact.file(ref.path), out / "reports" / folder / ref.path)
    bom = bill_of_materials(
        name=chart.model,
        revision=chart.revision,
        engine=spec.served,
        materials=spec.materials,
        reports=judgements.values(),
        config=spec.config,
        licence=spec.licence,
        image=chart.image.reference,
        libraries=spec.libraries,
    )
    _write_json(out / BOM, bom)
    statement = provenance(
        subjects=[hash_file(archive)],
        params=spec.params,
        materials=spec.materials,
        commit=spec.commit,
        repository=spec.repository,
    )
    _write_json(out / PROVENANCE, statement)
    (out / RUNBOOK).write_text(runbook(chart, judgements, signer, archive.name), "utf-8")
    facts = {
        "name": chart.name,
        "version": chart.version,
        "model": chart.model,
        "revision": chart.revision,
        "runtime": chart.runtime.kind,
        "image": chart.image.reference,
        "model_digest": f"sha256:{chart.model_digest}",
        "chart": archive.name,
        "verdicts": {folder: report.verdict.value for folder, report in judgements.items()},
    }
    page = overview(spec.served.digest, judgements, {k: v for k, v in facts.items() if isinstance(v, str)})
    (out / "report.html").write_text(html.document(page), "utf-8")
    (out / "summary.md").write_text(markdown.document(page), "utf-8")
    write_index(out, facts)
    (out / ENVELOPE).write_bytes(signer.envelope((out / PROVENANCE).read_bytes()))
    signer.sign_index(out, INDEX)


def _folders(reports: Sequence[tuple[Report, Artifact]]) -> list[str]:
    """Below `reports/`: the check's name, numbered where a pipeline has a check twice."""
    seen: Counter[str] = Counter()
    out = []
    for report, _ in reports:
        seen[report.check] += 1
        out.append(report.check if seen[report.check] == 1 else f"{report.check}-{seen[report.check]}")
    return out


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")
