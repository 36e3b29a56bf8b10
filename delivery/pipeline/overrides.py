"""`--set`: `ID.KEY=VALUE` for a step's parameter or input, `gate.KEY=VALUE` and the like for a section."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from delivery.errors import UsageError, did_you_mean
from delivery.pipeline.file import RESERVED
from delivery.pipeline.source import parse_text
from delivery.pipeline.values import is_flag, parsed, type_of
from delivery.steps.step import fields_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delivery.pipeline.file import PipelineFile
    from delivery.pipeline.source import Document, Place


# `--name`, and its value where one follows.
_OPTION = re.compile(
    r"--([a-z][a-z0-9-]*)(?: (?!-|(?:or|and|with|for|if|to|in|here|those|says)\b)([^\s;]*[^\s;,.]))?"
)
_OF_RUN = frozenset({"model"})


def apply_overrides(
    document: Document, file: PipelineFile, overrides: Sequence[str], steps: Mapping[str, type[Any]]
) -> None:
    """Change `document.data` in place; errors about changed values name the option from then on.

    Raises UsageError `bad-override`, `unknown-stage`, `unknown-key`, `wrong-type`.
    """
    ids = {entry.id or entry.uses: index for index, entry in enumerate(file.steps)}
    for text in overrides:
        path, equals, value = text.partition("=")
        target, *keys = path.strip().split(".")
        if not equals or not target or not (keys or target in ("model", "version")) or "" in keys:
            raise UsageError(
                "bad-override",
                f"--set {text}",
                why="expected ID.KEY=VALUE",
                hint="--set quantize.group_size=32",
            )
        label = f"--set {path.strip()}"
        if target == "release" and len(keys) == 1 and (step := _releasing(file, steps)) is not None:
            _put(document, (target, keys[0]), _step_value(step, target, keys, value, label)[1], label)
            continue
        if target in RESERVED:
            _put(document, (target, *keys), parse_text(value, label), label)
            continue
        if target not in ids:
            raise UsageError(
                "unknown-stage",
                f"{label}: {document.name} has no step {target!r}",
                hint=did_you_mean(target, [*ids, "gate", "release", "defaults"]),
            )
        entry = file.steps[ids[target]]
        if entry.uses in steps:
            place, found = _step_value(steps[entry.uses], entry.id or entry.uses, keys, value, label)
            _put(document, ("steps", ids[target], *place), found, label)


def _releasing(file: PipelineFile, steps: Mapping[str, type[Any]]) -> type[Any] | None:
    """The step that the `release` section configures."""
    used = (steps[entry.uses] for entry in file.steps if entry.uses in steps)
    return next((step for step in used if step.makes == "release"), None)


def as_override(hint: str, stage_id: str, step: type[Any]) -> str:
    """Translate a step's options in a hint into those of `run`: `--alpha 0.5` becomes `--set ID.alpha=0.5`.

    Options that `run` has too, and complete commands, are left unchanged.
    """
    fields = {f.name for f in fields_of(step) if not f.is_input} - _OF_RUN
    if "deliver " in hint:
        return hint

    def spoken(match: re.Match[str]) -> str:
        name, value = match[1].replace("-", "_"), match[2] or ""
        if name not in fields:
            return match[0]
        if is_flag(type_of(step, name)):
            return f"--set {stage_id}.{name}=true{f' {value}' if value else ''}"
        return f"--set {stage_id}.{name}={value or '…'}"

    return _OPTION.sub(spoken, hint)


def _step_value(
    step: type[Any], stage_id: str, keys: Sequence[str], text: str, label: str
) -> tuple[Place, Any]:
    fields = {f.name: f for f in fields_of(step)}
    key = keys[0].replace("-", "_")
    if key not in fields or len(keys) > 1:
        raise UsageError(
            "unknown-key",
            f"{label}: step {stage_id!r} has no parameter {'.'.join(keys)!r}",
            hint=did_you_mean(key, fields),
        )
    field = fields[key]
    if field.is_input:
        names = [name.strip() for name in text.split(",") if name.strip()]
        value: Any = names if field.metadata["many"] else text.strip()
        return ("inputs", key), None if text.strip() in ("", "null", "none") else value
    try:
        return ("with", key), parsed(text, type_of(step, key))
    except ValueError as error:
        raise UsageError("wrong-type", label, why=str(error)) from error


def _put(document: Document, place: Place, value: Any, label: str) -> None:
    at = document.data
    for depth, key in enumerate(place[:-1]):
        if isinstance(at, dict) and at.get(key) is None:
            at[key] = {}
            document.origins[place[: depth + 1]] = label
        at = at[key]
        if not isinstance(at, dict | list):
            raise UsageError(
                "bad-override", label, why=f"{'.'.join(map(str, place[: depth + 1]))} has no keys"
            )
    at[place[-1]] = value
    document.origins[place] = label
