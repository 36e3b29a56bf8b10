"""Run a pipeline stage by stage, reusing cached results, until it ends or a stage fails."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from safetensors import SafetensorError

from delivery.errors import DeliverError, UsageError, did_you_mean, environment_error
from delivery.pipeline.context import Reporter
from delivery.pipeline.events import RunLog
from delivery.pipeline.execute import Made, make
from delivery.pipeline.judge import Judged, judge
from delivery.pipeline.keys import Job
from delivery.pipeline.overrides import as_override
from delivery.pipeline.partners import with_partners
from delivery.pipeline.preflight import Forecast, check_stage, preflight
from delivery.pipeline.publish import publish
from delivery.pipeline.refs import resolve, short
from delivery.pipeline.result import RunResult, StageResult, run_record
from delivery.steps.step import fields_of, is_check

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import date

    from delivery.artifact import Artifact, Json
    from delivery.pipeline.judge import Render
    from delivery.pipeline.progress import Display
    from delivery.pipeline.spec import Pipeline, Stage
    from delivery.pipeline.store import Store

EVERYTHING = "*"


@dataclass(frozen=True, slots=True)
class Settings:
    """How stages are run. `force` names stages to run again; `EVERYTHING` means all of them."""

    store: Store
    display: Display
    gate: Mapping[str, Json]
    model: str
    force: frozenset[str] = frozenset()
    render: Render | None = None
    today: date | None = None


def run(
    pipeline: Pipeline,
    store: Store,
    display: Display,
    *,
    stages: Sequence[str] = (),
    until: str | None = None,
    force: Sequence[str] = (),
    render: Render | None = None,
    today: date | None = None,
    so_far: Callable[[RunResult], None] = lambda _: None,
) -> RunResult:
    """Run the pipeline, or only `stages` and what they need, or everything `until` a stage.

    A stage that fails ends the run: its error is in the result, and earlier results are kept. `so_far` is
    called with the result after every stage, for a run that is interrupted.
    Raises UsageError `unknown-stage`, and what `preflight` raises.
    """
    chosen = select(pipeline, stages, until, force)
    settings = Settings(
        store, display, pipeline.gate, model_name(pipeline.model), frozenset(force), render, today
    )
    forecast = Forecast(chosen, store, pipeline.device)
    preflight(chosen, forecast, store, pipeline.device)
    done: dict[str, StageResult] = {}
    with store.in_use():
        log = RunLog(store)
        log.event("run", pipeline=pipeline.name, model=settings.model, stages=[s.id for s in chosen])
        error: DeliverError | None = None
        for stage in chosen:
            try:
                done[stage.id] = run_stage(_job(stage, pipeline, done, store), settings, log)
                _look_ahead(stage, chosen, done, forecast)
            except DeliverError as failure:
                failure.hint = as_override(failure.hint, stage.id, stage.step)
                error = failure
            except (OSError, MemoryError, RuntimeError, ValueError, SafetensorError) as failure:
                error = environment_error(failure)
                if error is None:
                    log.event("bug", stage=stage.id, error=repr(failure))
                    raise
            error = error or (done[stage.id].error if stage.id in done else None)
            so_far(RunResult(tuple(done.values()), error, complete=False))
            log.record(run_record(done.values()), finished=False)
            if error is not None:
                log.event("stopped", stage=stage.id, code=error.code, what=error.what, why=error.why)
                break
        result = RunResult(tuple(done.values()), error, complete=len(done) == len(pipeline.stages))
        log.record(run_record(done.values()), finished=error is None)
        log.event("end", passed=error is None)
        with suppress(OSError):
            publish(store, done.values(), [s.id for s in chosen if s.id not in done])
    return result


def select(
    pipeline: Pipeline, stages: Sequence[str], until: str | None, force: Sequence[str] = ()
) -> tuple[Stage, ...]:
    """The stages to run, in order. Raises UsageError `unknown-stage`."""
    known = [s.id for s in pipeline.stages]
    for name in force:
        if name != EVERYTHING and name not in known:
            raise UsageError(
                "unknown-stage", f"{pipeline.name} has no stage {name!r}", hint=did_you_mean(name, known)
            )
    chosen = pipeline.stages if until is None else pipeline.until(until)
    if stages:
        needed = {s.id for s in pipeline.needed_for(stages)}
        chosen = tuple(s for s in chosen if s.id in needed)
    return chosen


def _look_ahead(
    stage: Stage, stages: Sequence[Stage], done: Mapping[str, StageResult], forecast: Forecast
) -> None:
    """After a stage has run, check the remaining stages that depend on it again, with what is now known."""
    result = done[stage.id]
    if result.error is not None:
        return
    forecast.made(stage.id, result.artifact)
    for later in stages:
        taken = {source.stage for sources in later.sources.values() for source in sources}
        if later.id not in done and stage.id in taken:
            check_stage(later, forecast)


def run_stage(job: Job, settings: Settings, log: RunLog) -> StageResult:
    """Make the artifact of one stage, and judge it if it is a check."""
    reporter = Reporter(job.id, settings.display, log)
    settings.display.line(job.id)
    log.event("start", stage=job.id)
    started = time.monotonic()
    job = with_partners(job, settings.store, settings.model)
    force = bool(settings.force & {job.id, EVERYTHING})
    made = make(job, settings.store, reporter, force=force, gate=settings.gate)
    artifact, report, error = made.artifact, None, None
    if is_check(type(job.step)):
        judged = _judged(job, made, settings)
        if made.cached and judged.undecided:
            settings.display.line("  the stored measurement is inconclusive: measuring again")
            made = make(job, settings.store, reporter, force=True, gate=settings.gate)
            judged = _judged(job, made, settings)
        artifact, report, error = judged.artifact, judged.report, judged.error
    result = StageResult(
        name=job.id,
        key=made.key,
        artifact=artifact,
        cached=made.cached,
        seconds=time.monotonic() - started if not made.cached else 0.0,
        record=settings.store.run_record(made.artifact),
        report=report,
        error=error,
    )
    log.event("done", stage=job.id, artifact=artifact.digest, cached=made.cached, seconds=result.seconds)
    settings.display.line(_summary(result))
    return result


def _judged(job: Job, made: Made, settings: Settings) -> Judged:
    return judge(
        job, made, settings.store, settings.gate, settings.model, render=settings.render, today=settings.today
    )


def model_name(model: str) -> str:
    """The model's name, which baselines are stored under: the last part of a path, a Hub id or a URL."""
    path = urlparse(model).path if "://" in model else model
    last = Path(path.rstrip("/")).name or "model"
    if "/" in model and "." in last:
        last = re.sub(r"\.(gguf|safetensors|bin|whl|zip|tar|gz)$", "", last)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last)


def _job(stage: Stage, pipeline: Pipeline, done: Mapping[str, StageResult], store: Store) -> Job:
    kinds = {f.name: f.metadata["kind"] for f in fields_of(stage.step) if f.is_input}
    inputs: dict[str, tuple[Artifact, ...]] = {}
    for role, sources in stage.sources.items():
        kind = kinds[role]
        inputs[role] = tuple(
            done[s.stage].artifact if s.stage else resolve(store, s.ref, kind) for s in sources
        )
    return Job(stage.id, stage.instance(), inputs, pipeline.device, pipeline.seed)


def _summary(result: StageResult) -> str:
    how = "cached" if result.cached else f"{result.seconds:.1f} s"
    verdict = f", {result.report.verdict.value}" if result.report else ""
    return f"  {how}{verdict}: {short(result.artifact.digest)}"
