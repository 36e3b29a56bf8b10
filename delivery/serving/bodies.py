"""Bodies of requests: from bytes to a schema's object, and what a client is told of a wrong one."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from delivery.serving.limits import parse_json_object
from delivery.serving.problem import Problem

_KIND = re.compile(r"str|int|(list|constrained-\w+)(\[.*\])?")
"""How pydantic names the members of a union in the place of an error."""
R = TypeVar("R", bound=BaseModel)


def parsed(body: bytes, kind: type[R]) -> R:
    """The body as a `kind`. Raises Problem (400) with the first field that is wrong."""
    try:
        return kind.model_validate(parse_json_object(body))
    except ValidationError as error:
        where, message = _first_fault(error)
        said = f"{where}: {message}" if where else message
        raise Problem(400, "invalid_value", said, param=where or None) from error


def _first_fault(error: ValidationError) -> tuple[str, str]:
    """Where the first wrong value is ("" for the whole) and what is wrong with it.

    Of a value that may be of several kinds there is an error for each kind that it is not: what is said of
    the kind that it is goes first. The name of a kind is no part of the place.
    """
    errors = error.errors(include_url=False)
    own = [e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]]
    first = next((e for e in own if not e["type"].endswith("_type")), own[0])
    where = ".".join(str(part) for part in first["loc"] if not _KIND.fullmatch(str(part)))
    return where, first["msg"].removeprefix("Value error, ")


def described(kind: type[BaseModel]) -> dict[str, Any]:
    """What the API page is told of a body: bodies are read by hand (limits, control bytes)."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    return {"requestBody": {"content": {"application/json": {"schema": _inline(schema, definitions)}}}}


def _inline(value: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        if "$ref" in value:
            return _inline(definitions[value["$ref"].rsplit("/", 1)[1]], definitions)
        return {key: _inline(child, definitions) for key, child in value.items()}
    return [_inline(child, definitions) for child in value] if isinstance(value, list) else value
