"""A pipeline, validated as a whole before any weight is read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from delivery.errors import UsageError, did_you_mean
from delivery.pipeline.file import Gate, PipelineFile
from delivery.pipeline.overrides import apply_overrides, as_override
from delivery.pipeline.problems import file_error
from delivery.pipeline.source import read_yaml
from delivery.pipeline.values import check_field, error_code
from delivery.pipeline.wiring import Node, Source, wire
from delivery.steps import CATALOG
from delivery.steps.step import fields_of, is_check

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from delivery.artifact import Json
    from delivery.pipeline.file import StepEntry
    from delivery.pipeline.source import Document, Place


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a pipeline with its id, all parameter values and the source of every role."""

    id: str
    step: type[Any]
    params: Mapping[str, Any]
    sources: Mapping[str, tuple[Source, ...]]

    def instance(self) -> Any:
        """The step itself; its input fields contain the sources as written."""
        roles = {
            f.name: tuple(map(str, found)) if f.metadata["many"] else str(found[0])
            for f in fields_of(self.step)
            if f.is_input and (found := self.sources.get(f.name))
        }
        return self.step(**self.params, **roles)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in order; `gate` is plain JSON as `JudgeContext.gate` gives it to checks."""

    name: str
    model: str
    device: str
    seed: int
    stages: tuple[Stage, ...]
    gate: Mapping[str, Json]

    def stage(self, stage_id: str) -> Stage:
        """Raises UsageError `unknown-stage`."""
        for stage in self.stages:
            if stage.id == stage_id:
                return stage
        known = [s.id for s in self.stages]
        raise UsageError(
            "unknown-stage", f"{self.name} has no stage {stage_id!r}", hint=did_you_mean(stage_id, known)
        )

    def needed_for(self, stage_ids: Sequence[str]) -> tuple[Stage, ...]:
        """These stages and everything that they depend on, in order."""
        wanted = {self.stage(s).id for s in stage_ids}
        for stage in reversed(self.stages):
            if stage.id in wanted:
                wanted |= {s.stage for sources in stage.sources.values() for s in sources if s.stage}
        return tuple(s for s in self.stages if s.id in wanted)

    def until(self, stage_id: str) -> tuple[Stage, ...]:
        """Every stage up to and including this one."""
        return self.stages[: self.stages.index(self.stage(stage_id)) + 1]


def load_pipeline(
    path: Path | str,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    steps: Mapping[str, type[Any]] = CATALOG,
) -> Pipeline:
    """Read, override (`ID.KEY=VALUE`) and validate a pipeline file.

    Raises UsageError, with file and line: `pipeline-not-found`, `yaml-invalid`, `yaml-duplicate-key`,
    `unknown-key`, `wrong-type`, `bad-value`, `missing-key`, `unknown-step`, `duplicate-stage`,
    `unknown-stage`, `wrong-kind`, `missing-input`, `bad-override`, and the gate's own errors.
    """
    document = read_yaml(Path(path))
    parsed = _validated(document)
    if overrides:
        apply_overrides(document, parsed, overrides, steps)
        parsed = _validated(document)
    _check_gate(parsed, document, steps)
    chosen = parsed.model_copy(update={"model": model}) if model else parsed
    return Pipeline(
        name=str(path),
        model=chosen.model,
        device=chosen.defaults.device,
        seed=chosen.defaults.seed,
        stages=_stages(chosen, document, steps),
        gate=gate_json(chosen.gate),
    )


def read_gate(path: Path) -> dict[str, Json]:
    """The `gate` section of a pipeline file as checks get it, without validating its steps.

    Raises UsageError as `load_pipeline` does.
    """
    document = read_yaml(path)
    parsed = _validated(document)
    _check_gate(parsed, document, CATALOG)
    return gate_json(parsed.gate)


def gate_json(gate: Gate) -> dict[str, Json]:
    """A gate section as checks get it: `missing_baseline` resolved, limits as numbers or {min, max}."""
    out: dict[str, Json] = gate.model_dump(mode="json", exclude_none=True)
    out.setdefault("missing_baseline", "fail" if os.environ.get("CI") else "bootstrap")
    return out


def _validated(document: Document) -> PipelineFile:
    if not isinstance(document.data, dict):
        raise UsageError(
            "wrong-type",
            f"{document.name} is not a pipeline",
            why="expected a mapping with `version` and `steps` at the top level",
            hint="deliver init writes a commented one",
        )
    try:
        return PipelineFile.model_validate(document.data)
    except ValidationError as error:
        raise file_error(error, document) from error


def _check_gate(parsed: PipelineFile, document: Document, steps: Mapping[str, type[Any]]) -> None:
    """Check names of metrics and the syntax of limits and waivers with the gate's own parsers."""
    from delivery.gate.limits import parse_target
    from delivery.gate.metrics import latency_kind
    from delivery.gate.waivers import parse

    gate = parsed.gate.model_dump(mode="json", exclude_none=True)
    checks: list[tuple[Place, Callable[[], object]]] = [
        *((("gate", "metrics", i), partial(latency_kind, n)) for i, n in enumerate(gate["metrics"])),
        *(
            (("gate", part, n), partial(parse_target, n, v, under_load=part == "slo"))
            for part in ("limits", "slo")
            for n, v in gate[part].items()
        ),
        *((("gate", "waivers", i), partial(parse, w)) for i, w in enumerate(gate["waivers"])),
        *(
            (("gate", "waivers", i, "check"), partial(_known_check, w["check"], steps))
            for i, w in enumerate(gate["waivers"])
            if w["check"]
        ),
    ]
    for place, check in checks:
        try:
            check()
        except UsageError as error:
            raise UsageError(
                error.code, f"{document.where(place)}: {error.what}", why=error.why, hint=error.hint
            ) from error


def _known_check(name: str, steps: Mapping[str, type[Any]]) -> None:
    """A waiver of a check that does not exist would be without effect. Raises UsageError `unknown-check`."""
    checks = [known for known, step in steps.items() if is_check(step)]
    if name not in checks:
        raise UsageError(
            "unknown-check",
            f"the waiver is for {name!r}, which is not a check",
            why=f"the checks are {', '.join(checks)}",
            hint=did_you_mean(name, checks),
        )


def _stages(parsed: PipelineFile, document: Document, steps: Mapping[str, type[Any]]) -> tuple[Stage, ...]:
    nodes: list[Node] = []
    stages: list[Stage] = []
    for index, entry in enumerate(parsed.steps):
        place: Place = ("steps", index)
        where = document.where(place)
        if entry.uses not in steps:
            raise UsageError(
                "unknown-step",
                f"{document.where((*place, 'uses'))}: there is no step {entry.uses!r}",
                hint=did_you_mean(entry.uses, steps),
            )
        stage_id, step = entry.id or entry.uses, steps[entry.uses]
        if any(node.id == stage_id for node in nodes):
            raise UsageError(
                "duplicate-stage",
                f"{where}: two steps have the id {stage_id!r}",
                hint="give one of them another `id`",
            )
        sources = wire(stage_id, step, entry.inputs, nodes, document.where((*place, "inputs")))
        params = _params(entry, step, parsed, document, place)
        nodes.append(Node(stage_id, step, sources))
        stages.append(Stage(stage_id, step, params, sources))
        _check_step(stages[-1], document.where((*place, "with")))
    _check_release(parsed, stages, document)
    return tuple(stages)


def _check_step(stage: Stage, where: str) -> None:
    try:
        stage.instance().check()
    except UsageError as error:
        what = f"{where}: step {stage.id!r}: {error.what}"
        hint = as_override(error.hint, stage.id, stage.step)
        raise UsageError(error.code, what, why=error.why, hint=hint) from error


def _params(
    entry: StepEntry, step: type[Any], parsed: PipelineFile, document: Document, place: Place
) -> dict[str, Any]:
    """Every parameter of a step: from `with`, else from the pipeline's sections, else its default."""
    fields = {f.name: f for f in fields_of(step) if not f.is_input}
    shared: dict[str, Any] = {
        "model": parsed.model,
        "device": parsed.defaults.device,
        "seed": parsed.defaults.seed,
    }
    given = {name: (value, (*place, "with", name)) for name, value in entry.with_.items()}
    if step.makes == "release":
        given = {**{n: (v, ("release", n)) for n, v in parsed.release.items()}, **given}
    for name, (_, at) in given.items():
        if name not in fields:
            raise UsageError(
                "unknown-key",
                f"{document.where(at)}: step {entry.id or entry.uses!r} has no parameter {name!r}",
                hint=did_you_mean(name, fields),
            )
    out = {}
    for name, field in fields.items():
        if name not in given:
            out[name] = shared.get(name, field.default)
            continue
        value, at = given[name]
        try:
            out[name] = check_field(step, field, value)
        except ValueError as error:
            raise UsageError(
                error_code(error),
                f"{document.where(at)}: {name}",
                why=str(error),
                hint=f"deliver {entry.uses} --help",
            ) from error
    return out


def _check_release(parsed: PipelineFile, stages: list[Stage], document: Document) -> None:
    if parsed.release and not any(s.step.makes == "release" for s in stages):
        raise UsageError(
            "unknown-key",
            f"{document.where(('release',))}: a `release` section, but no step makes a release",
            hint="add `- uses: package`, or remove the section",
        )
