"""Print the CI definition of a pipeline."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from delivery.cli._session import Session, pass_session

_DEFAULT = "pipelines/default.yaml"


@click.command()
@click.argument("system", type=click.Choice(["gitlab", "github"]))
@click.argument("pipeline", required=False, default=_DEFAULT)
@click.option("--install", metavar="COMMAND", help="Shell command that installs deliver in a job.")
@click.option("--image", help="Container image that GitLab's jobs run in.")
@click.option(
    "--watch", multiple=True, metavar="GLOB", help="Run on changes of these files too, beside the weights."
)
@pass_session
def command(
    session: Session,
    system: str,
    pipeline: str,
    install: str | None,
    image: str | None,
    watch: tuple[str, ...],
) -> None:
    """Print the CI definition of PIPELINE for GitLab or GitHub on stdout.

    One job a stage, run on every weight commit; artifacts, caches and reports are passed on, a missing
    baseline fails, and main is deployed with a rollback.
    """
    from delivery.cli._ci import CiOptions, render_ci
    from delivery.pipeline.spec import load_pipeline

    given = {"install": install, "image": image}
    words = ["deliver", "ci", system, pipeline]
    words += [w for name, value in given.items() if value for w in (f"--{name}", value)]
    words += [w for glob in watch for w in ("--watch", glob)]
    options = CiOptions(
        **{name: value for name, value in given.items() if value}, watch=watch, command=shlex.join(words)
    )
    loaded = load_pipeline(Path(pipeline), steps=session.steps)
    click.echo(render_ci(system, loaded, pipeline, options), nl=False)
