"""Verify an artifact's files against their checksums, and a release's signature."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delivery.artifact import Kind
from delivery.cli._session import Session, json_option, pass_session, workdir_option
from delivery.errors import DataError, DeliverError

if TYPE_CHECKING:
    from delivery.artifact import Artifact

_SIGNS = "package"


@click.command()
@click.argument("ref", required=False)
@click.option("--key", metavar="FILE", help="Public key (PEM) that the release must be signed with.")
@json_option
@workdir_option
@pass_session
def command(session: Session, ref: str | None, key: str | None, as_json: bool) -> None:
    """Verify REF: a path, a digest or a tag; without REF, everything in the workdir.

    Names every damaged file; the exit code is 1 if there is any. The signature of a release is verified too:
    with --key against that key, without it only against the key inside the release, which proves no identity.
    In a plain Hugging Face directory, which has no checksums, config, index and headers are cross-checked.
    """
    from delivery.pipeline.refs import find

    if ref is not None:
        artifacts, unreadable = [find(session.store, ref)], []
    else:
        artifacts = list(session.store.artifacts())
        unreadable = session.store.unreadable()
    rows: list[dict[str, Any]] = [
        {"path": str(path), "passed": False, "damage": "it has no readable manifest"} for path in unreadable
    ]
    errors: list[DeliverError] = []
    for artifact in artifacts:
        row = _row(artifact)
        try:
            _verify(artifact, key, named=ref is not None)
        except DeliverError as error:
            errors.append(error)
            row |= {"passed": False, "damage": error.why or error.what}
        rows.append(row)
    if not as_json:
        if not rows:
            click.echo(f"there are no artifacts in {session.workdir}")
        for row in rows:
            if row["passed"] or len(rows) > 1:
                click.echo(_told(row))
    failed = _summary(rows, errors)
    if as_json:
        told = {} if failed is None else {"error": failed.to_json()}
        session.answer({"passed": failed is None, "artifacts": rows, **told})
    if failed is not None:
        raise failed


def _verify(artifact: Artifact, key: str | None, *, named: bool) -> None:
    """`named`: the user means this artifact, so a key that cannot have signed it is a mistake."""
    from delivery.pipeline.collect import verify
    from delivery.pipeline.refs import is_external

    if is_external(artifact):
        _verify_plain(artifact)
    else:
        verify(artifact)
    if artifact.kind == Kind.RELEASE or (key is not None and named):
        _verify_release(artifact, key)


def _summary(rows: list[dict[str, Any]], errors: list[DeliverError]) -> DeliverError | None:
    """The error of the command: that of a single artifact, or the number of damaged ones."""
    bad = [row for row in rows if not row["passed"]]
    if not bad:
        return None
    if len(rows) == 1 and errors:
        return errors[0]
    return DataError(
        "artifact-damaged",
        f"{len(bad)} of {len(rows)} artifacts are damaged",
        why="; ".join(f"{row['path']}: {row['damage']}" for row in bad),
        hint="deliver run rebuilds damaged artifacts; copied ones have to be copied again",
    )


def _verify_release(artifact: Artifact, key: str | None) -> None:
    """The signature over the index, and every file against it. A release of `package` has both, always."""
    from delivery.release import load_public_key, verify_release
    from delivery.release.index import INDEX

    release = artifact.path
    if key is not None or artifact.manifest.step == _SIGNS or (release / INDEX).is_file():
        verify_release(release, load_public_key(Path(key)) if key else None)


def _verify_plain(artifact: Artifact) -> None:
    """A directory without a manifest: the checkpoint reader's own checks."""
    from delivery.checkpoint import Checkpoint

    Checkpoint.open(artifact.path)


def _row(artifact: Artifact) -> dict[str, Any]:
    from delivery.pipeline.refs import is_external

    return {
        "artifact": artifact.digest,
        "path": str(artifact.path),
        "kind": artifact.kind.value,
        "files": len(artifact.manifest.files),
        "checksums": not is_external(artifact),
        "passed": True,
    }


def _told(row: dict[str, Any]) -> str:
    if not row["passed"]:
        return f"{row['path']}: damaged: {row['damage']}"
    how = "every file matches its checksum"
    if not row["checksums"]:
        how = "intact; it has no checksums to compare with"
    return f"{row['path']}: {row['kind']}, {row['files']} files, {how}"
