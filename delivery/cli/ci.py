"""Print the CI definition of a pipeline; comment on a merge request."""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from delivery.cli._session import Session, pass_session, workdir_option
from delivery.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_DEFAULT = "pipelines/default.yaml"


@click.group()
def command() -> None:
    """Print the CI definition of a pipeline, or comment the results of its checks on a merge request."""


def _prints(system: str, title: str) -> Callable[..., None]:
    @command.command(
        name=system,
        short_help=f"Print the CI definition of a pipeline for {title}.",
        help=f"""Print the CI definition of PIPELINE (default: {_DEFAULT}) for {title} on stdout.

    One job per stage, run on every commit that touches weights. Jobs pass artifacts, caches and reports on; a
    missing baseline fails the pipeline; main is deployed, with automatic rollback.
    """,
    )
    @click.argument("pipeline", required=False, default=_DEFAULT)
    @click.option(
        "--package",
        metavar="REQUIREMENT",
        help="What jobs install with pip, for example 'deliver[demo] @ URL'; default: this build.",
    )
    @click.option("--install", metavar="COMMAND", help="Shell command that installs deliver, instead of pip.")
    @click.option(
        "--image", metavar="IMAGE", help="Container image that GitLab's jobs run in; default: Python's."
    )
    @click.option(
        "--watch",
        multiple=True,
        metavar="GLOB",
        help="Also run when these files change, besides the weights. Repeat for several.",
    )
    @pass_session
    def printed(
        session: Session,
        pipeline: str,
        package: str | None,
        install: str | None,
        image: str | None,
        watch: tuple[str, ...],
    ) -> None:
        from delivery.cli._ci import CiOptions, own_package, render_ci
        from delivery.pipeline.spec import load_pipeline

        if package and install:
            raise UsageError("usage", "--package and --install are both given", hint="one of them")
        if not (package or install):
            package = own_package(partial(click.echo, err=True))
        given = {"package": package, "install": install, "image": image}
        words = ["deliver", "ci", system, pipeline]
        words += [w for name, value in given.items() if value for w in (f"--{name}", value)]
        words += [w for glob in watch for w in ("--watch", glob)]
        options = CiOptions(package, install, image, watch, shlex.join(words))
        loaded = load_pipeline(Path(pipeline), steps=session.steps)
        click.echo(render_ci(system, loaded, pipeline, options), nl=False)

    return printed


_prints("gitlab", "GitLab")
_prints("github", "GitHub")


@command.command(short_help="Comment the results of the checks on a merge request.")
@click.argument("pipeline", required=False, default=_DEFAULT)
@workdir_option
@pass_session
def comment(session: Session, pipeline: str) -> None:
    """Comment the results of PIPELINE's checks on the merge request of this CI job.

    PIPELINE is pipelines/default.yaml by default. There is one comment per pipeline, which is updated. The
    merge request comes from the variables of GitLab or GitHub, the token from DELIVER_COMMENT_TOKEN; without
    a token nothing is posted.
    """
    from delivery.pipeline.spec import load_pipeline
    from delivery.report import comment as comments
    from delivery.report.compose import current_commit

    thread = comments.thread_of(os.environ)
    if isinstance(thread, comments.NoThread):
        click.echo(f"no comment: {thread.reason}")
        return
    stages = [stage.id for stage in load_pipeline(Path(pipeline), steps=session.steps).stages]
    commit = current_commit()
    reports = comments.reports_of(session.workdir / "reports", stages, commit)
    if not reports:
        click.echo(f"no comment: {session.workdir}/reports has no report of this commit")
        return
    done = thread.post(comments.marker(pipeline), comments.text_of(reports, commit))
    click.echo(f"comment {done}: {', '.join(f'{r.check} {r.verdict.value}' for r in reports)}")
