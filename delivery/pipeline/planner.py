"""Plan a run without changing anything: the order, what is cached, the predicted peak memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from delivery.artifact import Artifact
from delivery.errors import DeliverError
from delivery.pipeline.events import latest_steps
from delivery.pipeline.judge import verdict_key
from delivery.pipeline.keys import Job, differences, key_of, key_parts
from delivery.pipeline.partners import with_partners
from delivery.pipeline.preflight import Forecast, all_known, lacking_device, preflight
from delivery.pipeline.refs import resolve, short
from delivery.pipeline.result import size
from delivery.pipeline.runner import EVERYTHING, model_name, select
from delivery.steps.step import fields_of, is_check

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delivery.artifact import Json
    from delivery.pipeline.spec import Pipeline, Stage
    from delivery.pipeline.store import Store
    from delivery.steps.step import Known, Peak


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One stage. `status` is 'cached', 'judge' (measured already, judged again) or 'run'."""

    id: str
    step: str
    status: str
    why: str
    artifact: str
    peak: Peak | None
    lacks: str = ""
    """What the stage needs and this machine lacks."""

    def to_json(self) -> dict[str, Json]:
        """`predicted_peak_bytes` is host memory, `predicted_gpu_bytes` GPU memory (0 if no GPU is used); null
        if nothing is known yet."""
        known = ("id", "step", "status", "why", "artifact", "lacks")
        return {
            **{name: getattr(self, name) for name in known},
            "predicted_peak_bytes": None if self.peak is None else self.peak.host_bytes,
            "predicted_gpu_bytes": None if self.peak is None else self.peak.gpu_bytes,
        }


def plan(
    pipeline: Pipeline,
    store: Store,
    *,
    stages: Sequence[str] = (),
    until: str | None = None,
    force: Sequence[str] = (),
) -> tuple[PlanRow, ...]:
    """The stages in order, with what is known before anything runs.

    A stage after one that runs is planned to run too, though its result may turn out to be cached.
    Raises UsageError `unknown-stage`, and what `preflight` and resolving a `ref:` input raise.
    """
    known: dict[str, Artifact] = {}
    before = latest_steps(store)
    rows = []
    chosen = select(pipeline, stages, until, force)
    forecast = Forecast(chosen, store, pipeline.device)
    preflight(chosen, forecast, store)
    for stage in chosen:
        row, artifact = _row(stage, pipeline, store, known, before, set(force), forecast)
        if artifact is not None:
            known[stage.id] = artifact
            forecast.made(stage.id, artifact)
        rows.append(row)
    return tuple(rows)


def table(rows: Sequence[PlanRow]) -> str:
    """The plan in aligned columns."""
    cells = [("stage", "step", "status", "peak", "artifact", "why")]
    cells += [(r.id, r.step, r.status, _shown(r.peak), short(r.artifact), _why(r)) for r in rows]
    widths = [max(len(c[i]) for c in cells) for i in range(6)]
    return "\n".join("  ".join(t.ljust(w) for t, w in zip(c, widths, strict=True)).rstrip() for c in cells)


def _shown(peak: Peak | None) -> str:
    """Host memory, and GPU memory if a GPU is used."""
    if peak is None:
        return "?"
    host = size(peak.host_bytes)
    return f"{host}, GPU {size(peak.gpu_bytes)}" if peak.gpu_bytes else host


def _why(row: PlanRow) -> str:
    return f"{row.why}; needs {row.lacks}, which this machine lacks" if row.lacks else row.why


def _row(
    stage: Stage,
    pipeline: Pipeline,
    store: Store,
    known: Mapping[str, Artifact],
    before: Mapping[str, Mapping[str, Json]],
    force: set[str],
    forecast: Forecast,
) -> tuple[PlanRow, Artifact | None]:
    inputs, missing = _inputs(stage, store, known)
    if lacking_device(stage, pipeline.device) is not None:
        # Whether it is cached depends on the device, so it is unknown.
        why = f"after {', '.join(missing)}" if missing else "unknown without its device"
        return replace(_run_row(stage, why, _peak(stage, forecast)), lacks="a GPU"), None
    with store.remembering():
        job = Job(stage.id, stage.instance(), inputs, pipeline.device, pipeline.seed)
        job = with_partners(job, store, model_name(pipeline.model))
    peak = _peak(stage, forecast, all_known(job.inputs))
    if missing:
        return _run_row(stage, f"after {', '.join(missing)}", peak), None
    if force & {stage.id, EVERYTHING}:
        return _run_row(stage, "forced", peak), None
    with store.remembering():
        parts = key_parts(job)
    made = store.cached(key_of(parts))
    if made is None or store.damage(made) is not None:
        why = "damaged" if made else _changed(stage, parts, before, store)
        return _run_row(stage, why, peak), None
    if not is_check(stage.step):
        return PlanRow(stage.id, stage.step.name, "cached", "", made.digest, peak), made
    verdict = store.cached(verdict_key(made.digest))
    if verdict is not None and store.run_record(verdict).get("undecided"):
        return _run_row(stage, "the stored measurement is inconclusive", peak), None
    digest = verdict.digest if verdict else made.digest
    return PlanRow(stage.id, stage.step.name, "judge", "measured already", digest, peak), verdict


def _run_row(stage: Stage, why: str, peak: Peak | None) -> PlanRow:
    return PlanRow(stage.id, stage.step.name, "run", why, "", peak)


def _inputs(
    stage: Stage, store: Store, known: Mapping[str, Artifact]
) -> tuple[dict[str, tuple[Artifact, ...]], list[str]]:
    """Inputs that exist, and the stages that have to run to make the others."""
    kinds = {f.name: f.metadata["kind"] for f in fields_of(stage.step) if f.is_input}
    inputs: dict[str, tuple[Artifact, ...]] = {}
    missing: list[str] = []
    for role, sources in stage.sources.items():
        found = [known.get(s.stage) if s.stage else resolve(store, s.ref, kinds[role]) for s in sources]
        missing += [s.stage for s, a in zip(sources, found, strict=True) if a is None]
        there = tuple(a for a in found if a is not None)
        if len(there) == len(found):
            inputs[role] = there
    return inputs, list(dict.fromkeys(missing))


def _peak(stage: Stage, forecast: Forecast, found: Known = MappingProxyType({})) -> Peak | None:
    """The step's predicted peak, from its bound inputs and the partners that it `found` by itself."""
    try:
        predicted: Peak | None = stage.instance().predict_peak(
            {**found, **forecast.inputs(stage)}, forecast.device(stage)
        )
    except (DeliverError, OSError, LookupError):
        return None  # not known before its inputs exist
    return predicted


def _changed(
    stage: Stage, parts: Mapping[str, Any], before: Mapping[str, Mapping[str, Json]], store: Store
) -> str:
    """Why a stage runs again: what differs from the last time."""
    last = before.get(stage.id, {}).get("key")
    record = store.key_record(last) if last else None
    if record is None:
        return "not made yet" if last is None else "no longer in the store"
    return ", ".join(differences(record["parts"], parts)) or "no longer in the store"
