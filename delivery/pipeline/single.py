"""Run a single step outside a pipeline: `deliver STEP`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.artifact import MANIFEST, Artifact, read_artifact
from delivery.pipeline.events import RunLog
from delivery.pipeline.export import check_target, export
from delivery.pipeline.keys import Job
from delivery.pipeline.preflight import all_known
from delivery.pipeline.publish import publish
from delivery.pipeline.refs import is_external, resolve
from delivery.pipeline.result import StageResult, run_record
from delivery.pipeline.runner import EVERYTHING, Settings, model_name, run_stage
from delivery.steps.step import fields_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delivery.artifact import Json
    from delivery.pipeline.judge import Render
    from delivery.pipeline.progress import Display
    from delivery.pipeline.store import Store


def run_step(
    step: Any,
    store: Store,
    display: Display,
    *,
    out: Path | None = None,
    device: str = "auto",
    seed: int = 0,
    gate: Mapping[str, Json] | None = None,
    force: bool = False,
    render: Render | None = None,
) -> StageResult:
    """Run a step whose input fields hold references (paths, tags, digests), and export it to `out`.

    The result becomes `latest/<step>`, as in a pipeline whose stages have the names of their steps. A failed
    check is committed and exported too; its error is in the result. `gate` is what a check judges by, as in
    `JudgeContext.gate`.
    """
    step.check()
    if out is not None:
        check_target(out)
    inputs = resolve_inputs(step, store)
    job = Job(type(step).name, step, inputs, device, seed)
    step.preflight(all_known(inputs), job.resolved_device() if step.uses_device else "cpu")
    with store.in_use():
        settings = Settings(
            store,
            display,
            {"missing_baseline": "bootstrap"} if gate is None else gate,
            subject_name(inputs, store),
            frozenset({EVERYTHING} if force else ()),
            render,
        )
        log = RunLog(store)
        log.event("step", step=type(step).name)
        result = run_stage(job, settings, log)
        log.record(run_record([result]), finished=True)
        with suppress(OSError):
            publish(store, [result])
        if out is not None:
            export(store, result.artifact, out)
    return result


def resolve_inputs(step: Any, store: Store) -> dict[str, tuple[Artifact, ...]]:
    """Role → the artifacts that its references resolve to. Raises as `refs.resolve` does."""
    out = {}
    for field in fields_of(type(step)):
        given: str | Sequence[str] | None = getattr(step, field.name) if field.is_input else None
        if given:
            refs = (given,) if isinstance(given, str | Path) else tuple(given)
            out[field.name] = tuple(resolve(store, ref, field.metadata["kind"]) for ref in refs)
    return out


def subject_name(inputs: Mapping[str, tuple[Artifact, ...]], store: Store) -> str:
    """The name of the model that the inputs were made from, which baselines are stored under.

    It is the `model` parameter of the first step, as recorded in the store; for a chain that began with a
    plain directory, that directory's name.
    """
    queue = [artifact for found in inputs.values() for artifact in found]
    seen: set[str] = set()
    while queue:
        artifact = queue.pop(0)
        if artifact.digest in seen:
            continue
        seen.add(artifact.digest)
        if is_external(artifact):
            return model_name(str(artifact.path.resolve()))
        record = store.run_record(artifact)
        given = record.get("params", {}).get("model") or next(
            iter(record.get("plain_inputs", {}).values()), ""
        )
        if given:
            return model_name(str(given))
        parents = [d for v in artifact.manifest.inputs.values() for d in ((v,) if isinstance(v, str) else v)]
        queue += [read_artifact(store.path_of(d)) for d in parents if (store.path_of(d) / MANIFEST).is_file()]
    return "model"
