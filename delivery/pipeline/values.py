"""Parse and check values of step fields by their declared types, from YAML or from the command line."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from delivery.errors import did_you_mean

if TYPE_CHECKING:
    from delivery.steps.step import Field


class NotAllowed(ValueError):
    """A value of the right type that is not among its field's choices, or is out of range."""


_WORDS = {"true": True, "false": False}
_NONE = ("none", "null")
_SCALARS: Mapping[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "nothing",
}


def type_of(cls: type[Any], name: str) -> Any:
    """The evaluated type of a dataclass field."""
    return typing.get_type_hints(cls)[name]


def describe(hint: Any) -> str:
    """A type in words: 'a whole number', 'a list of text'."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in arguments)
    if origin is Literal:
        return " or ".join(repr(a) for a in arguments)
    if origin in (list, tuple, Sequence):
        return f"a list of {describe(arguments[0])}" if arguments else "a list"
    if origin in (dict, Mapping):
        return f"a mapping to {describe(arguments[1])}" if arguments else "a mapping"
    return "any value"


def is_list(hint: Any) -> bool:
    """Whether a field of this type takes several values (an option given several times)."""
    return any(get_origin(h) in (list, tuple, Sequence) for h in _alternatives(hint))


def is_mapping(hint: Any) -> bool:
    return any(get_origin(h) in (dict, Mapping) for h in _alternatives(hint))


def is_flag(hint: Any) -> bool:
    return bool in _alternatives(hint) and str not in _alternatives(hint)


def checked(value: Any, hint: Any) -> Any:
    """`value` converted to the type (an int becomes a float if a float is expected).

    Raises ValueError with a sentence: 'expected a whole number, got 'many' (text)'.
    """
    for alternative in _alternatives(hint):
        try:
            return _as(value, alternative)
        except _Mismatch:
            continue
    raise ValueError(f"expected {describe(hint)}, got {shown(value)}")


def parsed(text: str, hint: Any) -> Any:
    """The value of a command line's `text`. Raises ValueError as `checked` does."""
    alternatives = _alternatives(hint)
    if type(None) in alternatives and text.lower() in _NONE:
        return None
    if is_list(hint) or is_mapping(hint):
        return checked(_collection(text, hint), hint)
    for alternative in alternatives:
        try:
            return _as(_scalar(text, alternative), alternative)
        except (_Mismatch, ValueError):
            continue
    raise ValueError(f"expected {describe(hint)}, got {text!r}")


def check_field(cls: type[Any], field: Field, value: Any) -> Any:
    """`value` checked against the type, the choices and the range of one declared field.

    Raises ValueError, NotAllowed; `error_code` tells the two apart.

    A whole number is accepted as text if text is expected: `group_size: 64` needs no quotes.
    """
    hint = type_of(cls, field.name)
    if hint is str and type(value) is int:
        value = str(value)
    value = checked(value, hint)
    choices = field.metadata["choices"]
    if choices is not None and value is not None:
        allowed = tuple(choices() if callable(choices) else choices)
        for one in value if isinstance(value, list | tuple) else (value,):
            if one not in allowed:
                raise NotAllowed(f"{one!r} is not a choice; {did_you_mean(str(one), allowed)}")
    low, high = field.metadata["at_least"], field.metadata["at_most"]
    if isinstance(value, int | float) and not (
        math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high)
    ):
        raise NotAllowed(f"expected a number {_range(low, high)}, got {value}")
    return value


def error_code(error: ValueError) -> str:
    """The error code for an error of `check_field` or `parsed`."""
    return "bad-value" if isinstance(error, NotAllowed) else "wrong-type"


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"from {low:g} to {high:g}"
    if high is not None:
        return f"of at most {high:g}"
    return "that is finite" if low is None else f"of at least {low:g}"


class _Mismatch(Exception):
    """The value does not have the type that was tried."""


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _as(value: Any, hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _if(value in arguments, value)
    if origin in (list, tuple, Sequence):
        _if(isinstance(value, list | tuple), value)
        return (list if origin is list else tuple)(_each(value, arguments[0]) if arguments else value)
    if origin in (dict, Mapping):
        _if(isinstance(value, Mapping) and all(isinstance(k, str) for k in value), value)
        return dict(zip(value, _each(value.values(), arguments[1]), strict=True)) if arguments else value
    if hint is float:
        _if(isinstance(value, int | float) and not isinstance(value, bool), value)
        return float(value)
    if hint in _SCALARS:
        return _if(isinstance(value, hint) and (hint is bool or not isinstance(value, bool)), value)
    return value


def _each(values: Any, hint: Any) -> list[Any]:
    out = []
    for value in values:
        for alternative in _alternatives(hint):
            try:
                out.append(_as(value, alternative))
                break
            except _Mismatch:
                continue
        else:
            raise _Mismatch
    return out


def _if(fits: bool, value: Any) -> Any:
    if not fits:
        raise _Mismatch
    return value


def _scalar(text: str, hint: Any) -> Any:
    if hint is bool:
        return _WORDS.get(text.lower(), text)
    if hint in (int, float):
        return hint(text)
    if get_origin(hint) is Literal:
        return next((a for a in get_args(hint) if str(a) == text), text)
    return text


def _collection(text: str, hint: Any) -> Any:
    """`a,b` or `[a, b]`; `k=1,l=2` or `{k: 1, l: 2}`."""
    if text[:1] in ("[", "{"):
        from delivery.pipeline.source import parse_text

        return parse_text(text, "the value")
    parts = [part.strip() for part in text.split(",") if part.strip()]
    item = next((get_args(h)[-1 if is_mapping(hint) else 0] for h in _alternatives(hint) if get_args(h)), str)
    if is_list(hint):
        return [parsed(part, item) for part in parts]
    return {key: parsed(value, item) for key, _, value in (part.partition("=") for part in parts)}


def shown(value: Any) -> str:
    for kind, words in _SCALARS.items():
        if type(value) is kind:
            return words if value is None else f"{value!r} ({words})"
    return "a list" if isinstance(value, list | tuple) else "a mapping"
