"""Read every byte of an artifact again and compare it with its checksums."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from delivery.cli._session import Session, json_option, pass_session, workdir_option

if TYPE_CHECKING:
    from delivery.artifact import Artifact


@click.command()
@click.argument("ref", required=False)
@json_option
@workdir_option
@pass_session
def command(session: Session, ref: str | None, as_json: bool) -> None:
    """Verify REF: a path, a digest or a tag; without REF, everything in the workdir.

    A damaged file is named, and the exit code is 1. A plain Hugging Face directory has no checksums:
    there, config, index and headers are checked against each other.
    """
    from delivery.pipeline.collect import verify
    from delivery.pipeline.refs import find, is_external

    artifacts = [find(session.store, ref)] if ref is not None else list(session.store.artifacts())
    done = []
    for artifact in artifacts:
        if is_external(artifact):
            _verify_plain(artifact)
        else:
            verify(artifact)
        done.append(_row(artifact, checksums=not is_external(artifact)))
        if not as_json:
            click.echo(_told(artifact, checksums=not is_external(artifact)))
    if as_json:
        click.echo(json.dumps({"passed": True, "artifacts": done}, ensure_ascii=False))


def _verify_plain(artifact: Artifact) -> None:
    """A directory without a manifest: the checkpoint reader's own checks."""
    from delivery.checkpoint import Checkpoint

    Checkpoint.open(artifact.path)


def _row(artifact: Artifact, *, checksums: bool) -> dict[str, object]:
    return {
        "artifact": artifact.digest,
        "path": str(artifact.path),
        "kind": artifact.kind.value,
        "files": len(artifact.manifest.files),
        "checksums": checksums,
    }


def _told(artifact: Artifact, *, checksums: bool) -> str:
    how = "every file matches its checksum" if checksums else "sound; it has no checksums to compare with"
    return f"{artifact.path}: {artifact.kind}, {len(artifact.manifest.files)} files, {how}"
