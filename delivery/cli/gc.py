"""Free disk space: remove artifacts that no tag and no latest result depends on."""

from __future__ import annotations

import click

from delivery.cli._session import Session, json_option, pass_session, workdir_option


@click.command()
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option("--scratch", is_flag=True, help="Also remove unfinished work that the next run would resume.")
@json_option
@workdir_option
@pass_session
def command(session: Session, dry_run: bool, scratch: bool, as_json: bool) -> None:
    """Remove artifacts of the workdir that are no longer needed.

    Keeps tagged artifacts, the latest artifact of every stage, the artifacts of the last finished run, and
    everything that these were made from. `deliver tag NAME REF` keeps an artifact permanently.
    """
    from delivery.pipeline.collect import gc
    from delivery.pipeline.refs import short
    from delivery.pipeline.result import size

    garbage = gc(session.store, dry_run=dry_run, scratch=scratch)
    if as_json:
        removed = [a.digest for a in garbage.artifacts]
        session.answer({"removed": removed, "size_bytes": garbage.size_bytes, "dry_run": dry_run})
        return
    for artifact in garbage.artifacts:
        click.echo(f"{short(artifact.digest)}  {artifact.kind}  {artifact.manifest.step}")
    done = "would be freed" if dry_run else "freed"
    click.echo(f"{len(garbage.artifacts)} artifacts, {size(garbage.size_bytes)} {done}")
