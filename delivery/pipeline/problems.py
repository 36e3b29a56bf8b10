"""Translate a pydantic validation error: file and line, what was expected, what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delivery.errors import UsageError, did_you_mean
from delivery.pipeline.file import Bounds, Defaults, Gate, PipelineFile, StepEntry, Waiver
from delivery.pipeline.values import shown

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

    from delivery.pipeline.source import Document, Place

_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
# Names of union members that pydantic adds to a location; they do not occur in the file.
_MEMBERS = {"str", "float", "Bounds", "list[str]"}


def file_error(error: ValidationError, document: Document) -> UsageError:
    """The most useful error: an unknown key (which often explains a missing one), else the first."""
    problems = error.errors()
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    place = _place(problem["loc"])
    where = document.where(place)
    path = ".".join(str(part) for part in place)
    if problem["type"] == "extra_forbidden":
        known = _keys(place[:-1])
        return UsageError(
            "unknown-key", f"{where}: unknown key {place[-1]!r}", hint=did_you_mean(str(place[-1]), known)
        )
    if problem["type"] == "missing":
        return UsageError("missing-key", f"{where}: the key {path!r} is missing")
    if problem["type"] in _EXPECTED:
        same = [p for p in problems if _place(p["loc"]) == place]
        wanted = " or ".join(dict.fromkeys(_EXPECTED.get(p["type"], "another type") for p in same))
        return UsageError(
            "wrong-type", f"{where}: {path}", why=f"expected {wanted}, got {shown(problem['input'])}"
        )
    if problem["type"] == "literal_error":
        return UsageError(
            "bad-value",
            f"{where}: {path}",
            why=f"expected {problem['ctx']['expected']}, got {shown(problem['input'])}",
        )
    return UsageError("bad-value", f"{where}: {path}", why=_reason(problem))


def _reason(problem: ErrorDetails) -> str:
    """What is wrong with a value of the right type."""
    limits = problem.get("ctx", {})
    match problem["type"]:
        case "greater_than_equal":
            return f"expected a number of at least {limits['ge']}, got {problem['input']}"
        case "too_short":
            return f"expected at least {limits['min_length']}, got {limits['actual_length']}"
        case "string_too_short":
            return "expected text, got an empty value"
    return problem["msg"].removeprefix("Value error, ")


def _place(location: tuple[int | str, ...]) -> Place:
    return tuple(part for part in location if part not in _MEMBERS)


def _keys(place: Place) -> list[str]:
    """The keys that the mapping at `place` may have."""
    model: type[BaseModel] = PipelineFile
    if place[:1] == ("steps",):
        model = StepEntry
    elif place[:1] == ("defaults",):
        model = Defaults
    elif place[:2] == ("gate", "limits"):
        model = Bounds
    elif place[:2] == ("gate", "waivers"):
        model = Waiver
    elif place[:1] == ("gate",):
        model = Gate
    return [field.alias or name for name, field in model.model_fields.items()]
