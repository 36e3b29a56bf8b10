"""Run a pipeline from a checkpoint to a release, or part of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from delivery.cli._session import Session, json_option, pass_session, stdout_kept, workdir_option
from delivery.errors import UsageError

if TYPE_CHECKING:
    from delivery.pipeline.planner import PlanRow
    from delivery.pipeline.result import RunResult
    from delivery.pipeline.spec import Pipeline

_DEFAULT = "pipelines/default.yaml"
_EVERYTHING = "*"


@click.command()
@click.argument("pipeline", required=False)
@click.option("--model", metavar="PATH|demo|HUB_ID|URL", help="Model to use instead of the pipeline's.")
@click.option(
    "--stage",
    "stages",
    metavar="NAME",
    multiple=True,
    help="Run only this stage and the stages it depends on. Repeat for several.",
)
@click.option("--until", metavar="NAME", help="Run everything up to and including this stage.")
@click.option(
    "--set",
    "overrides",
    metavar="ID.KEY=VALUE",
    multiple=True,
    help="Change a parameter of a stage (quantize.group_size=32) or a key of a section (defaults.device=cpu, "
    "gate.limits.kl_nats=0.2). Repeat for several.",
)
@click.option(
    "--plan", is_flag=True, help="Only show what would run, what is cached, and the predicted peak memory."
)
@click.option(
    "--force",
    metavar="[NAME]",
    is_flag=False,
    flag_value=_EVERYTHING,
    multiple=True,
    help="Run a stage (without NAME: every stage) again even if it is cached.",
)
@json_option
@workdir_option
@pass_session
def command(
    session: Session,
    pipeline: str | None,
    model: str | None,
    stages: tuple[str, ...],
    until: str | None,
    overrides: tuple[str, ...],
    plan: bool,
    force: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run PIPELINE (default: pipelines/default.yaml) from a checkpoint to a release.

    Results that have not changed since the last run are taken from the workdir, and a run that was killed
    resumes. Exit codes: 0 pass, 1 a step failed, 2 usage, 3 gate failed, 4 undecided, 5 no baseline,
    6 environment lacking.
    """
    # `--force pipelines/x.yaml` is parsed as a stage name; if it is a file, it is the pipeline.
    if pipeline is None and force and Path(force[-1]).is_file():
        pipeline, force = force[-1], (*force[:-1], _EVERYTHING)
    loaded = _load(session, pipeline, overrides, model)
    if plan:
        with stdout_kept(for_answer=as_json):
            rows = _plan(session, loaded, stages, until, force)
        if as_json:
            session.answer({"steps": [row.to_json() for row in rows]})
        else:
            _show_plan(rows)
        return
    with stdout_kept(for_answer=as_json):
        result = _run(session, loaded, stages, until, force)
    if as_json:
        session.answer(result.to_json())
    else:
        _show(result)
    if result.error is not None:
        raise result.error


def _load(session: Session, pipeline: str | None, overrides: tuple[str, ...], model: str | None) -> Pipeline:
    from delivery.pipeline.spec import load_pipeline

    return load_pipeline(_path(pipeline), overrides, model=model, steps=session.steps)


def _run(
    session: Session, pipeline: Pipeline, stages: tuple[str, ...], until: str | None, force: tuple[str, ...]
) -> RunResult:
    from delivery.pipeline.progress import display
    from delivery.pipeline.runner import run

    shown = display()
    try:
        return run(
            pipeline,
            session.store,
            shown,
            stages=stages,
            until=until,
            force=force,
            so_far=lambda result: session.keep({"steps": result.to_json()["steps"]}),
        )
    finally:
        shown.close()


def _path(pipeline: str | None) -> Path:
    """The file as written; the shipped default where there is none in the current folder."""
    if pipeline is not None and (Path(pipeline).exists() or not pipeline.startswith("pipelines/")):
        return Path(pipeline)
    from delivery.resources import resource

    name = pipeline or _DEFAULT
    try:
        return Path(name) if Path(name).exists() else resource(name)
    except FileNotFoundError as error:
        raise UsageError(
            "pipeline-not-found",
            f"there is no pipeline file {name}",
            hint="deliver init writes a commented one",
        ) from error


def _plan(
    session: Session, pipeline: Pipeline, stages: tuple[str, ...], until: str | None, force: tuple[str, ...]
) -> tuple[PlanRow, ...]:
    from delivery.pipeline.planner import plan
    from delivery.pipeline.store import Store

    return plan(pipeline, Store(session.workdir, read_only=True), stages=stages, until=until, force=force)


def _show_plan(rows: tuple[PlanRow, ...]) -> None:
    from delivery.pipeline.planner import table

    click.echo(table(rows))


def _show(result: RunResult) -> None:
    from delivery.pipeline.result import table

    if result.steps:
        click.echo(f"\n{table(result)}\n")
    if result.release is not None:
        click.echo(f"release: {result.release}")
    if result.report_page is not None:
        click.echo(f"report:  {result.report_page}")
    if result.error is None:
        click.echo(result.last_line())
