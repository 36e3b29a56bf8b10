"""Show what differs between two artifacts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from delivery.cli._session import Session, json_option, pass_session, workdir_option
from delivery.pipeline.refs import resolve, short

if TYPE_CHECKING:
    from delivery.artifact import Artifact, Json
    from delivery.pipeline.store import Store


@click.command()
@click.argument("a")
@click.argument("b")
@json_option
@workdir_option
@pass_session
def command(session: Session, a: str, b: str, as_json: bool) -> None:
    """Show what differs between the artifacts A and B: step, parameters, inputs, files, metrics."""
    store = session.store
    before, after = (_facts(resolve(store, ref), store) for ref in (a, b))
    changes = {
        f"{part}.{name}" if name else part: [old.get(name), new.get(name)]
        for part in before
        for old, new in ((before[part], after[part]),)
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    }
    if as_json:
        session.answer({"same": not changes, "changes": changes})
        return
    for name, (old, new) in changes.items():
        click.echo(f"{name}: {_shown(old)} → {_shown(new)}")
    if not changes:
        click.echo("the same")


def _facts(artifact: Artifact, store: Store) -> dict[str, dict[str, Json]]:
    manifest = artifact.manifest
    inputs = {
        role: short(d) if isinstance(d, str) else [short(one) for one in d]
        for role, d in manifest.inputs.items()
    }
    return {
        "": {"kind": manifest.kind.value, "step": manifest.step, "step_version": manifest.step_version},
        "params": dict(manifest.params),
        "inputs": inputs,
        "files": {f.path: f"{short(f.sha256)} ({f.size_bytes} bytes)" for f in manifest.files},
        "metrics": _metrics(artifact, store),
    }


def _metrics(artifact: Artifact, store: Store) -> dict[str, Json]:
    from delivery.gate.report import FILE_NAME, Report

    if artifact.file(FILE_NAME).is_file():
        return {m.name: m.value for m in Report.read(artifact.path).metrics}
    return {name: m["value"] for name, m in store.run_record(artifact).get("metrics", {}).items()}


def _shown(value: Json) -> str:
    return "–" if value is None else str(value)
