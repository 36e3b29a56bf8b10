"""Name an artifact; a tagged artifact is never removed by gc."""

from __future__ import annotations

import click

from delivery.cli._session import Session, pass_session, workdir_option
from delivery.errors import UsageError
from delivery.pipeline.refs import resolve, short


@click.command()
@click.argument("name", required=False)
@click.argument("ref", required=False)
@click.option("--delete", is_flag=True, help="Remove the tag NAME.")
@workdir_option
@pass_session
def command(session: Session, name: str | None, ref: str | None, delete: bool) -> None:
    """Name the artifact REF (a digest, a path or another tag) NAME; without arguments, list tags."""

    store = session.store
    if name is None:
        for tag, digest in store.tags().items():
            click.echo(f"{tag}  {short(digest)}")
        return
    if delete:
        store.untag(name)
        return
    if ref is None:
        raise UsageError("usage", "tag needs NAME and REF", hint="deliver tag --help")
    artifact = resolve(store, ref)
    store.tag(name, artifact)
    click.echo(f"{name}  {short(artifact.digest)}")
