"""List the artifacts of the workdir."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from delivery.artifact import Kind
from delivery.cli._session import Session, json_option, pass_session, workdir_option

if TYPE_CHECKING:
    from delivery.artifact import Artifact, Json
    from delivery.pipeline.store import Store


@click.command()
@click.option("--kind", type=click.Choice([k.value for k in Kind]), help="Only artifacts of this kind.")
@json_option
@workdir_option
@pass_session
def command(session: Session, kind: str | None, as_json: bool) -> None:
    """List the artifacts of the workdir, oldest first, with their tags."""
    rows = [_row(a, session.store) for a in session.store.artifacts() if kind in (None, a.kind.value)]
    rows.sort(key=lambda row: row["started_at"])
    if as_json:
        session.answer({"artifacts": rows})
        return
    from delivery.pipeline.refs import short
    from delivery.pipeline.result import size

    cells = [("artifact", "kind", "step", "size", "made", "tags")]
    cells += [
        (
            short(r["artifact"]),
            r["kind"],
            r["step"] + _outcome(r),
            size(r["size_bytes"]),
            r["started_at"],
            " ".join(r["tags"]),
        )
        for r in rows
    ]
    widths = [max(len(c[i]) for c in cells) for i in range(6)]
    for c in cells:
        click.echo("  ".join(t.ljust(w) for t, w in zip(c, widths, strict=True)).rstrip())


def _outcome(row: dict[str, Json]) -> str:
    """For a check: its verdict, or that this is the measurement behind one."""
    if row["kind"] != Kind.REPORT:
        return ""
    return f" ({row['verdict'] or 'measured'})"


def _row(artifact: Artifact, store: Store) -> dict[str, Json]:
    record = store.run_record(artifact)
    return {
        "artifact": artifact.digest,
        "path": str(artifact.path),
        "kind": artifact.kind.value,
        "step": artifact.manifest.step,
        "verdict": record.get("verdict", ""),
        "size_bytes": sum(f.size_bytes for f in artifact.manifest.files),
        "started_at": record.get("started_at", ""),
        "tags": [name for name, digest in store.tags().items() if digest == artifact.digest],
    }
