"""Show an artifact: its files, parameters, inputs, metrics and reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from delivery.artifact import MANIFEST, Kind
from delivery.checkpoint import describe
from delivery.checkpoint.inspect_text import as_lines
from delivery.cli._session import Session, json_option, pass_session, workdir_option
from delivery.errors import UsageError, did_you_mean
from delivery.pipeline.refs import ENGINE_FILE, resolve

if TYPE_CHECKING:
    from delivery.artifact import Artifact, Json
    from delivery.gate.report import Report
    from delivery.pipeline.store import Store


@click.command()
@click.argument("ref")
@click.option("--report", "check", metavar="CHECK", help="Show the latest report of this check about REF.")
@json_option
@workdir_option
@pass_session
def command(session: Session, ref: str, check: str | None, as_json: bool) -> None:
    """Show the artifact REF (a digest, a path or a tag), or what a check reported about it.

    REF may also be any checkpoint: a Hugging Face folder or a GGUF file. For a checkpoint, its family, size,
    dtypes, quantisation, context, tokenizer and licence are shown, and which engines load it, or why not.
    """
    store = session.store
    if check is None and (checkpoint := _foreign(ref)) is not None:
        facts = describe(checkpoint)
        lines = as_lines(facts)
    else:
        artifact = resolve(store, ref)
        if check is not None:
            artifact = _report_about(artifact, check, store)
        facts = _facts(artifact, store)
        lines = _lines(facts)
    if as_json:
        session.answer(facts)
        return
    for line in lines:
        click.echo(line)


def _foreign(ref: str) -> Path | None:
    """The checkpoint at a path, if it was not made by deliver: it is described, not hashed."""
    path = Path(ref).expanduser()
    if path.is_file():
        return path
    known = path.is_dir() and any((path / name).is_file() for name in (MANIFEST, ENGINE_FILE))
    return path if path.is_dir() and not known else None


def _facts(artifact: Artifact, store: Store) -> dict[str, Json]:
    """Everything known about the artifact, as JSON; a kind adds its own facts under its name."""
    record = store.run_record(artifact)
    facts = {
        "artifact": artifact.digest,
        "path": str(artifact.path),
        "size_bytes": sum(f.size_bytes for f in artifact.manifest.files),
        **artifact.manifest.to_json(),
        "tags": [name for name, digest in store.tags().items() if digest == artifact.digest],
        "run": record,
    }
    if artifact.kind == Kind.CHECKPOINT and artifact.file("config.json").is_file():
        facts["checkpoint"] = describe(artifact.path)
    report = _report(artifact)
    if report is not None:
        facts["report"] = report.to_json()
    facts["reports"] = [
        {"check": r.check, "verdict": r.verdict.value, "artifact": a.digest}
        for a, r in _about(artifact, store)
    ]
    return facts


def _report(artifact: Artifact) -> Report | None:
    from delivery.gate.report import FILE_NAME, Report

    return Report.read(artifact.path) if artifact.file(FILE_NAME).is_file() else None


def _about(subject: Artifact, store: Store) -> list[tuple[Artifact, Report]]:
    """Reports whose inputs name the subject, oldest first."""
    found = []
    for artifact in store.artifacts():
        inputs = artifact.manifest.inputs.values()
        if any(subject.digest == d or subject.digest in d for d in inputs) and (report := _report(artifact)):
            found.append((artifact, report))
    return sorted(found, key=lambda pair: pair[0].path.stat().st_mtime_ns)


def _report_about(artifact: Artifact, check: str, store: Store) -> Artifact:
    own = _report(artifact)
    if own is not None and own.check == check:
        return artifact
    reports = _about(artifact, store)
    matching = [a for a, report in reports if check in (report.check, a.manifest.step)]
    if not matching:
        known = {report.check for _, report in reports}
        raise UsageError(
            "no-report",
            f"there is no report of {check!r} about {artifact.path}",
            hint=did_you_mean(check, known) if known else f"deliver {check} --engine {artifact.digest[:12]}",
        )
    return matching[-1]


def _lines(facts: dict[str, Json]) -> list[str]:
    from delivery.pipeline.refs import short
    from delivery.pipeline.result import size
    from delivery.report.words import amount

    lines = [
        f"{facts['kind']} {short(facts['artifact'])}  {' '.join(facts['tags'])}".rstrip(),
        f"path:    {facts['path']}",
        f"made by: {facts['step']} (version {facts['step_version']})",
        f"files:   {len(facts['files'])}, {size(facts['size_bytes'])}",
    ]
    lines += [f"  {f['path']}  {size(f['size_bytes'])}" for f in facts["files"]]
    lines += as_lines(facts["checkpoint"]) if "checkpoint" in facts else []
    lines += ["params:", *(f"  {k}: {v}" for k, v in facts["params"].items())] if facts["params"] else []
    if facts["inputs"]:
        lines += ["made from:"]
        lines += [f"  {role}: {_digests(d)}" for role, d in facts["inputs"].items()]
    run = facts["run"]
    if run.get("seconds") is not None:
        lines += [f"run:     {run['started_at']}, {run['seconds']} s on {run['device']}"]
    lines += [f"  {k} {amount(m['value'], m['unit'])}" for k, m in run.get("metrics", {}).items()]
    lines += [f"  {f['severity']}: {f['text']}" for f in run.get("findings", ())]
    if "report" in facts:
        lines += _report_lines(facts["report"])
    lines += [f"report:  {r['check']} {r['verdict']} {short(r['artifact'])}" for r in facts["reports"]]
    return lines


def _report_lines(report: dict[str, Json]) -> list[str]:
    from delivery.report.words import amount

    lines = [f"verdict: {report['verdict']}"]
    for m in report["metrics"]:
        limit = "" if m["limit"] is None else f", limit {amount(m['limit'], m['unit'])}"
        baseline = "" if m["baseline"] is None else f", baseline {amount(m['baseline'], m['unit'])}"
        lines.append(f"  {m['name']} {amount(m['value'], m['unit'])}{baseline}{limit}  [{m['status']}]")
    return [*lines, *(f"  {f['severity']}: {f['text']}" for f in report["findings"])]


def _digests(value: str | list[str]) -> str:
    from delivery.pipeline.refs import short

    return short(value) if isinstance(value, str) else " ".join(map(short, value))
