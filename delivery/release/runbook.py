"""RUNBOOK.md, for the engineer on call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined

from delivery.release.chart import GRACE_S
from delivery.report import markdown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delivery.gate.report import Report
    from delivery.release.chart import ChartSpec
    from delivery.release.signature import Signer

_TEMPLATE = Path(__file__).parent / "runbook_template.md.j2"
_MIB = 1 << 20


def runbook(spec: ChartSpec, judgements: Mapping[str, Report], signer: Signer, archive: str) -> str:
    """The runbook of one release. judgements: folder → report. `archive` is the name of the chart's .tgz."""
    period_s, failures, _ = spec.measured.startup()
    image = spec.image
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string(_TEMPLATE.read_text("utf-8")).render(
        model=spec.model,
        chart=spec.name,
        version=spec.version,
        revision=spec.revision,
        runtime=spec.runtime.kind,
        api_key_from_file=spec.runtime.api_key_from_file,
        engine=f"sha256:{spec.model_digest}",
        image=image.reference,
        image_by_tag=image.allow_tag,
        hardware=spec.hardware.name,
        signed_by="an ephemeral key (proves nobody's identity)" if signer.is_ephemeral else signer.key_id,
        ephemeral=signer.is_ephemeral,
        reports=judgements,
        findings=[
            {"check": folder, "severity": finding.severity, "text": markdown.escape(finding.text)}
            for folder, report in judgements.items()
            for finding in report.findings
            if finding.severity != "info"
        ],
        archive=archive,
        files=len(spec.files),
        size_mib=spec.size_bytes // _MIB + 1,
        baseline=round(spec.measured.output_tokens_per_s or 0.0, 1),
        startup_s=period_s * failures,
        grace_s=GRACE_S,
        timeout_min=(period_s * failures + 1800) // 60,
    )
