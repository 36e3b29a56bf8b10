"""What is known about every stage's inputs before and during a run, and preflight checks against it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from delivery.device import resolve_device
from delivery.errors import DeliverError, EnvironmentLacking
from delivery.pipeline.overrides import as_override
from delivery.pipeline.refs import resolve
from delivery.steps.step import Ahead, fields_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from delivery.artifact import Artifact
    from delivery.pipeline.spec import Stage
    from delivery.pipeline.store import Store
    from delivery.steps.step import Known


class Forecast:
    """Stages and their artifacts. `made` records an artifact; outlines of the others are predicted."""

    def __init__(self, stages: Sequence[Stage], store: Store, device: str = "auto") -> None:
        """device: the pipeline's."""
        self._store = store
        self._device = device
        # One per stage, so that its outline is read once.
        self._known = {stage.id: self._ahead(stage) for stage in stages}

    def made(self, stage_id: str, artifact: Artifact) -> None:
        self._known[stage_id] = known_of(artifact)

    def inputs(self, stage: Stage) -> Known:
        """Raises what resolving a `ref:` input raises."""
        kinds = {f.name: f.metadata["kind"] for f in fields_of(stage.step) if f.is_input}
        return {
            role: tuple(
                known_of(resolve(self._store, s.ref, kinds[role])) if s.ref else self._known[s.stage]
                for s in sources
            )
            for role, sources in stage.sources.items()
        }

    def device(self, stage: Stage) -> str:
        """'cpu' or 'cuda': the stage's device, whether or not this machine has it."""
        try:
            return resolve_device(stage.params.get("device") or self._device)
        except EnvironmentLacking:
            return "cuda"

    def _ahead(self, stage: Stage) -> Ahead:
        return Ahead(
            stage.step.name, stage.params, predict=lambda: stage.instance().outline(self.inputs(stage))
        )


def known_of(artifact: Artifact) -> Ahead:
    """An existing artifact, as a step sees it in `preflight`."""
    return Ahead(artifact.manifest.step, artifact.manifest.params, artifact.path)


def all_known(inputs: Mapping[str, tuple[Artifact, ...]]) -> Known:
    """The same for all inputs of a step."""
    return {role: tuple(map(known_of, found)) for role, found in inputs.items() if found}


def preflight(stages: Sequence[Stage], forecast: Forecast, store: Store, device: str | None = None) -> None:
    """Check all stages before the first of them runs.

    Checks parameters against what is known about the inputs, then every external file. `device` is the
    pipeline's; its presence is checked too, except for a plan, which may be for another machine.
    Raises what a step's `preflight` and `external` raise, and EnvironmentLacking `no-gpu`.
    """
    for stage in stages:
        if device is not None and (lacking := lacking_device(stage, device)) is not None:
            raise lacking
    for stage in stages:
        check_stage(stage, forecast)
    with store.remembering():
        for stage in stages:
            with naming(stage):
                stage.instance().external()


def check_stage(stage: Stage, forecast: Forecast) -> None:
    """A stage's own `preflight`; its error names the stage."""
    with naming(stage):
        stage.instance().preflight(forecast.inputs(stage), forecast.device(stage))


@contextmanager
def naming(stage: Stage) -> Iterator[None]:
    """Errors raised inside name the stage, and their hints name options of `run`."""
    try:
        yield
    except DeliverError as error:
        hint = as_override(error.hint, stage.id, stage.step)
        raise type(error)(error.code, f"step {stage.id!r}: {error.what}", why=error.why, hint=hint) from error


def lacking_device(stage: Stage, device: str) -> EnvironmentLacking | None:
    """The error for a stage whose device this machine lacks; `device` is the pipeline's."""
    if not stage.step.uses_device:
        return None
    own = stage.params.get("device")
    try:
        resolve_device(own or device)
    except EnvironmentLacking as error:
        what = f"step {stage.id!r} needs a GPU, but no NVIDIA GPU can be used"
        target = f"{stage.id}.device" if own else "defaults.device"
        return EnvironmentLacking(
            error.code, what, why=error.why, hint=f"--set {target}=cpu; or deliver doctor"
        )
    return None
