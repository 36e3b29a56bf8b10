"""Read every byte of an artifact again and compare it with its checksums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from delivery.artifact import Kind
from delivery.cli._session import Session, json_option, pass_session, workdir_option

if TYPE_CHECKING:
    from delivery.artifact import Artifact


@click.command()
@click.argument("ref", required=False)
@click.option("--key", metavar="FILE", help="Public key (PEM) that must have signed a release.")
@json_option
@workdir_option
@pass_session
def command(session: Session, ref: str | None, key: str | None, as_json: bool) -> None:
    """Verify REF: a path, a digest or a tag; without REF, everything in the workdir.

    A damaged file is named, and the exit code is 1. Of a release the signature is verified too: with
    --key, that it is by that key; without, only that it fits the key inside, which proves no identity.
    A plain Hugging Face directory has no checksums: there, config, index and headers are checked
    against each other.
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
        if artifact.kind == Kind.RELEASE:
            _verify_release(artifact.path, key)
        done.append(_row(artifact, checksums=not is_external(artifact)))
        if not as_json:
            click.echo(_told(artifact, checksums=not is_external(artifact)))
    if as_json:
        click.echo(json.dumps({"passed": True, "artifacts": done}, ensure_ascii=False))


def _verify_release(release: Path, key: str | None) -> None:
    """The signature over the index, and every file against it."""
    from delivery.release import load_public_key, verify_release
    from delivery.release.index import INDEX

    if key is not None or (release / INDEX).is_file():
        verify_release(release, load_public_key(Path(key)) if key else None)


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
