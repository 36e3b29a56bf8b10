"""Verdicts: computed from the cached measurement every time, committed as a report, raised as an error."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery import __version__
from delivery.artifact import Manifest, canonical_json, place
from delivery.errors import BaselineError, DeliverError, GateFailed, Undecided
from delivery.gate import waivers
from delivery.gate.report import Finding, Report, Verdict
from delivery.pipeline.context import Judgement
from delivery.pipeline.keys import key_of
from delivery.pipeline.refs import short
from delivery.resources import resource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from delivery.artifact import Artifact, Json
    from delivery.pipeline.execute import Made
    from delivery.pipeline.keys import Job
    from delivery.pipeline.store import Store

    Render = Callable[[Report, Path], Any]


@dataclass(frozen=True, slots=True)
class Judged:
    """A committed report, and the error for its verdict (None if the pipeline may continue)."""

    artifact: Artifact
    report: Report
    error: DeliverError | None

    @property
    def undecided(self) -> bool:
        """Whether the measurement is unusable (disturbed, too noisy), so that a new one may decide."""
        return isinstance(self.error, Undecided)


def judge(
    job: Job,
    made: Made,
    store: Store,
    gate: Mapping[str, Json],
    model: str,
    *,
    render: Render | None = None,
    today: date | None = None,
) -> Judged:
    """Judge a measurement and commit the report about it.

    A verdict equal to an earlier one about the same measurement reuses its artifact: it is neither rendered
    nor written again.
    """
    measurement = made.artifact
    with store.key_lock(f"judge-{measurement.digest}"), store.building() as out:
        for ref in measurement.manifest.files:
            place(measurement.file(ref.path), out / ref.path)
        ctx = Judgement(
            measurement=measurement,
            out=out,
            model=model,
            gate=gate,
            baselines=committed_baselines(),
            local_baselines=store.workdir / "baselines",
            bound=job.inputs,
        )
        report, missing = _report(job, ctx)
        report = waivers.apply(report, gate.get("waivers", ()), today or datetime.now(UTC).date())
        error = missing or error_of(job.id, report)
        text = canonical_json(report.to_json())
        parts = {
            "measurement": measurement.digest,
            "report": hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest(),
            "params": job.params(judging=True),
            "deliver": __version__,
        }
        key = key_of(parts)
        artifact = store.cached(key)
        if artifact is None or store.damage(artifact) is not None:
            if artifact is not None:
                store.discard(artifact)
            report.write(out)
            (render or _render)(report, out)
            step = type(job.step)
            manifest = Manifest(
                step.makes,
                step.name,
                step.version,
                job.params(judging=True),
                {**job.input_digests(), "measurement": measurement.digest},
            )
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            record: dict[str, Json] = {"stage": job.id, "started_at": now, "verdict": report.verdict.value}
            record["model"] = model
            record["undecided"] = isinstance(error, Undecided)
            artifact = store.commit(out, manifest, record)
            store.remember_key(key, artifact, parts)
        store.remember_key(verdict_key(measurement.digest), artifact, parts)
    return Judged(artifact, report, error)


def verdict_key(measurement_digest: str) -> str:
    """The key of the latest report about a measurement."""
    return f"verdict-{measurement_digest}"


def committed_baselines() -> Path:
    """`baselines/` of the repository that deliver runs in, else the examples shipped with deliver."""
    here = Path("baselines")
    if here.is_dir():
        return here
    try:
        return resource("baselines")
    except FileNotFoundError:
        return here


def error_of(stage_id: str, report: Report) -> DeliverError | None:
    """The error for a verdict; None for pass, bootstrapped and waived."""
    if report.verdict.releases:
        return None
    subject = short(report.subject)
    hint = f"deliver inspect {subject} --report {report.check}"
    if report.verdict == Verdict.FAIL:
        return GateFailed(
            "gate-failed", f"{stage_id} rejected {subject}", why=_why(report, Verdict.FAIL), hint=hint
        )
    return Undecided(
        f"measurement-{report.verdict.value}",
        f"{stage_id} cannot judge {subject}",
        why=_why(report, report.verdict),
        hint=f"{hint}; the next run measures again",
    )


def _report(job: Job, ctx: Judgement) -> tuple[Report, BaselineError | None]:
    try:
        return job.step.judge(ctx), None
    except BaselineError as error:
        subject = next((a.digest for a in ctx.inputs("engine")), ctx.measurement.digest)
        text = f"{error.what}: {error.why}" if error.why else error.what
        return Report(job.id, subject, Verdict.INVALID, findings=(Finding("error", text),)), error


def _render(report: Report, out: Path) -> None:
    from delivery.report import render

    render(report, out)


def _why(report: Report, verdict: Verdict) -> str:
    """The reasons for a verdict: findings of severity error, else the failed metrics."""
    reasons = [f.text for f in report.findings if f.severity == "error"]
    if not reasons:
        reasons = [
            f"{m.name} is {m.value:.4g} {m.unit}" + (f" (limit {m.limit:.4g})" if m.limit is not None else "")
            for m in report.metrics
            if m.status == verdict.value
        ]
    return "; ".join(reasons)
