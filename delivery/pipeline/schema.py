"""The JSON schema of a pipeline file: its structure, and the parameters and inputs of every step.

`python -m delivery.pipeline.schema > pipelines/pipeline.schema.json` writes it; a test checks that it is
up to date. Editors use it to complete and validate: `# yaml-language-server: $schema=pipeline.schema.json`.
"""

from __future__ import annotations

import json
import types
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from delivery.pipeline.file import PipelineFile
from delivery.pipeline.values import type_of
from delivery.steps import CATALOG
from delivery.steps.step import fields_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delivery.artifact import Json
    from delivery.steps.step import Field

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def pipeline_schema(steps: Mapping[str, type[Any]] = CATALOG) -> dict[str, Json]:
    """The schema for a catalogue of steps, JSON Schema 2020-12."""
    schema: dict[str, Json] = _untitled(PipelineFile.model_json_schema())
    entry = schema["$defs"].pop("StepEntry")
    shared = {name: entry["properties"][name] for name in ("id", "inputs")}
    variants = [_entry(name, steps[name], shared) for name in steps]
    schema["properties"]["steps"]["items"] = {"oneOf": variants}
    releases = [steps[name] for name in steps if steps[name].makes == "release"]
    if len(releases) == 1:
        schema["properties"]["release"] |= _params(releases[0])
    return {"$schema": _DIALECT, **schema}


def _entry(name: str, step: type[Any], shared: Mapping[str, Json]) -> dict[str, Json]:
    roles = [f for f in fields_of(step) if f.is_input]
    inputs = {
        f.name: {
            "description": f.metadata["help"] or f"A step that makes a {f.metadata['kind']}.",
            "type": ["string", "array", "null"] if f.metadata["many"] else ["string", "null"],
            **({"items": {"type": "string"}} if f.metadata["many"] else {}),
        }
        for f in roles
    }
    return {
        "type": "object",
        "description": (step.__doc__ or "").strip().partition("\n")[0],
        "required": ["uses"],
        "additionalProperties": False,
        "properties": {
            "id": shared["id"],
            "uses": {"const": name},
            "with": {"type": "object", **_params(step)},
            "inputs": {
                "type": "object",
                "description": shared["inputs"]["description"],
                "additionalProperties": False,
                "properties": inputs,
            },
        },
    }


def _params(step: type[Any]) -> dict[str, Json]:
    fields = [f for f in fields_of(step) if not f.is_input]
    return {"additionalProperties": False, "properties": {f.name: _param(step, f) for f in fields}}


def _param(step: type[Any], field: Field) -> dict[str, Json]:
    hint = type_of(step, field.name)
    out: dict[str, Json] = {"type": ["string", "integer"]} if hint is str else _type(hint)
    choices = field.metadata["choices"]
    if choices is not None:
        allowed = list(choices() if callable(choices) else choices)
        if out.get("type") == "array":
            out["items"] = {"enum": allowed}
        else:
            out = {"enum": [*allowed, None] if field.default is None else allowed}
    for name, bound in (("minimum", "at_least"), ("maximum", "at_most")):
        if field.metadata[bound] is not None:
            out[name] = field.metadata[bound]
    out["description"] = field.metadata["help"]
    if not field.metadata["secret"] and field.default is not None:
        out["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    return out


def _type(hint: Any) -> dict[str, Json]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type(a) for a in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (list, tuple):
        return {"type": "array", "items": _type(arguments[0])} if arguments else {"type": "array"}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(arguments[1])}
    return {}


def _untitled(value: Any) -> Any:
    """Without pydantic's titles, which only repeat names; a property called `title` is kept."""
    if isinstance(value, dict):
        return {k: _untitled(v) for k, v in value.items() if not (k == "title" and isinstance(v, str))}
    return [_untitled(v) for v in value] if isinstance(value, list) else value


if __name__ == "__main__":
    print(json.dumps(pipeline_schema(), indent=1, ensure_ascii=False))
