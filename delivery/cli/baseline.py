"""Show, update and assess the baselines that `compare` measures engines against."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delivery.cli._session import (
    Session,
    device_option,
    json_option,
    pass_session,
    stdout_kept,
    workdir_option,
)
from delivery.errors import UsageError
from delivery.pipeline.refs import resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delivery.artifact import Artifact
    from delivery.gate.baseline import Baseline

_DECIDES = "compare"
_WITH_IT = ("smoke", "evaluate")
_PIPELINE = "pipelines/default.yaml"


@click.group()
def command() -> None:
    """Manage baselines: one file per model, device and workload, changed only here and with a reason."""


@command.command(short_help="List baselines with their numbers and their history.")
@click.option(
    "--baselines",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of committed baselines; default: baselines/ here, or the examples shipped with deliver.",
)
@json_option
@workdir_option
@pass_session
def show(session: Session, baselines: Path | None, as_json: bool) -> None:
    """List baselines with their numbers and their history."""
    from delivery.pipeline.judge import committed_baselines

    roots = [baselines or committed_baselines(), session.workdir / "baselines"]
    rows = [_row(path, found) for root in roots for path, found in _read_all(root)]
    if as_json:
        session.answer({"baselines": rows})
        return
    for row in rows:
        click.echo(_text(row))
    if not rows:
        click.echo(f"no baselines in {' or '.join(map(str, roots))}")


@command.command(short_help="Make a measurement the baseline, with a reason.")
@click.argument("report", required=False)
@click.option(
    "--reason", required=True, metavar="TEXT", help="Why the baseline changes; kept in its history."
)
@click.option(
    "--model",
    metavar="NAME",
    help="Model that the baseline belongs to; default: the one the report is about.",
)
@click.option("--released", is_flag=True, help="The measured engine was released: move the anchor as well.")
@click.option(
    "--baselines",
    type=click.Path(path_type=Path),
    default=Path("baselines"),
    show_default=True,
    metavar="DIR",
    help="Folder that the baseline is written to.",
)
@click.option(
    "--pipeline",
    metavar="FILE",
    help=f"Pipeline file that names the model; default: {_PIPELINE}, if neither --model nor the report does.",
)
@json_option
@workdir_option
@pass_session
def update(
    session: Session,
    report: str | None,
    reason: str,
    model: str | None,
    released: bool,
    baselines: Path,
    pipeline: str | None,
    as_json: bool,
) -> None:
    """Make the measurement behind REPORT the baseline.

    Default: the last compare report, of a pipeline or of `deliver compare`, together with those of smoke and
    evaluate about the same engine. The last release stays the anchor unless --released is given, so that
    small regressions cannot accumulate.
    """
    if not reason.strip():
        raise UsageError("reason-missing", "a baseline changes only with a reason", hint="--reason TEXT")
    chosen = [resolve(session.store, report)] if report else _last_reports(session)
    name = model or (None if pipeline else session.store.run_record(chosen[0]).get("model"))
    name = str(name or _model_of(pipeline or _PIPELINE))
    rows = [_updated(session, artifact, name, reason, released, baselines) for artifact in chosen]
    if as_json:
        session.answer({**rows[0], "also": [row["path"] for row in rows[1:]]})
        return
    for row in rows:
        click.echo(_text(row))
    click.echo(f"commit {' '.join(row['path'] for row in rows)}")


@command.command(short_help="Run an engine against itself: spread, and the smallest detectable effect.")
@click.argument("engine", metavar="REF")
@click.option(
    "--workload",
    default="demo",
    show_default=True,
    metavar="NAME|FILE",
    help="Workload of every run: the name of a built-in one, or a JSON file.",
)
@click.option(
    "--runs",
    default=5,
    show_default=True,
    type=click.IntRange(2),
    metavar="N",
    help="Number of runs of the same engine.",
)
@device_option
@json_option
@workdir_option
@pass_session
def noise(session: Session, engine: str, workload: str, runs: int, device: str, as_json: bool) -> None:
    """Run REF against itself: the spread between runs and the smallest slow-down that can be detected."""
    from delivery.bench.noise import measure_noise

    with stdout_kept(for_answer=as_json):
        found = measure_noise(resolve(session.store, engine).path, workload, runs, device)
    if as_json:
        session.answer({"runs": runs, "workload": workload, "metrics": found})
        return
    click.echo(f"{'metric':<16}{'value':>12}{'spread':>10}{'smallest effect':>18}")
    for name, row in found.items():
        click.echo(
            f"{name:<16}{row['value_ms']:>9.2f} ms{row['spread']:>10.1%}{row['minimum_effect']:>18.1%}"
            + ("  noisy: over 5 %" if row["noisy"] else "")
        )


def _read_all(root: Path) -> Iterator[tuple[Path, Baseline]]:
    from delivery.gate import baseline as store

    for path in sorted(root.glob("*/*/*.json")) if root.is_dir() else ():
        yield path, store.read(path)


def _row(path: Path, found: Baseline) -> dict[str, Any]:
    now = found.current
    return {
        "path": str(path),
        "model": found.model,
        "device": path.parent.name,
        "workload": found.workload_digest,
        "engine": now.engine,
        "reason": now.reason,
        "commit": now.commit,
        "recorded": now.recorded,
        "bootstrapped": found.bootstrapped,
        "runs": len(now.runs),
        "values": dict(now.values),
        "memory": dict(now.memory),
        "anchor": None if found.anchor is None else found.anchor.engine,
        "history": [dict(row) for row in found.history],
    }


def _text(row: dict[str, Any]) -> str:
    values = ", ".join(
        f"{name} {row['values'][name]:.4g}"
        for name in ("ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms", "output_throughput")
        if name in row["values"]
    )
    marks = " (bootstrapped)" if row["bootstrapped"] else ""
    parts = [
        f"{row['runs']} runs" if row["runs"] else "",
        values,
        f"last release {row['anchor'][:12]}" if row["anchor"] else "",
        f"{len(row['history'])} in the history",
    ]
    return (
        f"{row['path']}{marks}\n  engine {row['engine'][:12]}, {row['recorded']}: {row['reason']}\n"
        f"  {'; '.join(filter(None, parts))}"
    )


def _last_reports(session: Session) -> list[Artifact]:
    """The last compare's report, then those of smoke and evaluate about the same engine."""
    last = session.workdir / "latest"
    if not (last / _DECIDES).is_dir():
        raise UsageError(
            "unknown-ref",
            "no compare report is given",
            why=f"there is no {last / _DECIDES}",
            hint="deliver run or deliver compare, in this workdir; or baseline update REPORT --reason TEXT",
        )
    found = [
        resolve(session.store, str((last / name).resolve()))
        for name in (_DECIDES, *_WITH_IT)
        if (last / name).is_dir()
    ]
    return [a for a in found if a.manifest.inputs.get("engine") == found[0].manifest.inputs.get("engine")]


def _updated(
    session: Session, artifact: Artifact, model: str, reason: str, released: bool, root: Path
) -> dict[str, Any]:
    """Create or update the baseline from one report; returns its row."""
    from delivery.gate import baseline as store
    from delivery.gate.lookup import check_content
    from delivery.steps.step import fields_of

    step = session.steps.get(artifact.manifest.step)
    if step is None or not hasattr(step, "as_baseline"):
        raise UsageError(
            "wrong-kind",
            f"{artifact.path} is not a report of compare, smoke or evaluate",
            why=f"it was made by {artifact.manifest.step}",
            hint="deliver ls",
        )
    known = {f.name for f in fields_of(step) if not f.is_input}
    params = {name: value for name, value in artifact.manifest.params.items() if name in known}
    place, taken = step(**params).as_baseline(model, artifact, reason)
    path = place.path(root)
    before = store.read(path) if path.is_file() else None
    if before:
        check_content(path, before, place)
    made = (
        before.updated(taken, released=released)
        if before
        else store.new(model, place.device, place.workload, place.workload_digest, taken, bootstrapped=False)
    )
    store.write(path, made)
    return _row(path, made)


def _model_of(pipeline: str) -> str:
    from delivery.pipeline import load_pipeline
    from delivery.pipeline.runner import model_name
    from delivery.resources import resource

    path = Path(pipeline)
    try:
        found = path if path.is_file() else resource(pipeline)
    except FileNotFoundError as error:
        raise UsageError(
            "pipeline-not-found",
            f"there is no pipeline file {pipeline}",
            why="it names the model that the baseline belongs to",
            hint="--pipeline FILE, or --model NAME",
        ) from error
    return model_name(load_pipeline(found).model)
