"""GitHub's `${{ }}` expressions for the local runner: contexts, `== != && || !`, `always()` and its kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TOKEN = re.compile(
    r"\s*(?:(?P<op>==|!=|&&|\|\||!|\(|\))|'(?P<text>(?:[^']|'')*)'|(?P<call>\w+)\(\)|(?P<name>[\w.-]+))"
)
_EMBEDDED = re.compile(r"\$\{\{(.*?)\}\}")
_CONSTANTS = {"true": True, "false": False, "null": None}


def expand(value: Any, contexts: Mapping[str, Any]) -> str:
    """A text with its expressions filled in; what is unknown is empty, as GitHub has it."""
    return _EMBEDDED.sub(lambda m: shown(evaluate(m[1], contexts)), shown(value))


def shown(value: Any) -> str:
    """As GitHub writes a value into a text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def runs(condition: Any, contexts: Mapping[str, Any], *, failed: bool) -> bool:
    """Whether a job or step with this `if` runs; one that names no status runs only while all is well."""
    if condition is None:
        return not failed
    text = str(condition).strip()
    text = text[3:-2] if text.startswith("${{") and text.endswith("}}") else text
    calls = {"always": True, "success": not failed, "failure": failed, "cancelled": False}
    asked = bool(evaluate(text, {**contexts, "()": calls}))
    return asked and (not failed or any(f"{name}()" in text for name in calls))


def evaluate(expression: str, contexts: Mapping[str, Any]) -> Any:
    """The value of one expression. Raises ValueError for what this cannot read."""
    tokens: list[re.Match[str]] = []
    at = 0
    while expression[at:].strip():
        found = _TOKEN.match(expression, at)
        if not found:
            raise ValueError(f"cannot read {expression[at:]!r}")
        tokens.append(found)
        at = found.end()
    value = _either(tokens, contexts)
    if tokens:
        raise ValueError(f"{expression!r} goes on after its end")
    return value


def _take(tokens: list[re.Match[str]], *operators: str) -> str:
    return tokens.pop(0)["op"] if tokens and tokens[0]["op"] in operators else ""


def _either(tokens: list[re.Match[str]], contexts: Mapping[str, Any]) -> Any:
    value = _both(tokens, contexts)
    while _take(tokens, "||"):
        other = _both(tokens, contexts)
        value = value or other
    return value


def _both(tokens: list[re.Match[str]], contexts: Mapping[str, Any]) -> Any:
    value = _same(tokens, contexts)
    while _take(tokens, "&&"):
        other = _same(tokens, contexts)
        value = value and other
    return value


def _same(tokens: list[re.Match[str]], contexts: Mapping[str, Any]) -> Any:
    value = _one(tokens, contexts)
    while operator := _take(tokens, "==", "!="):
        equal = shown(value).lower() == shown(_one(tokens, contexts)).lower()
        value = equal is (operator == "==")
    return value


def _one(tokens: list[re.Match[str]], contexts: Mapping[str, Any]) -> Any:
    if _take(tokens, "!"):
        return not _one(tokens, contexts)
    if _take(tokens, "("):
        value = _either(tokens, contexts)
        if not _take(tokens, ")"):
            raise ValueError("a bracket is not closed")
        return value
    token = tokens.pop(0)
    if token["text"] is not None:
        return token["text"].replace("''", "'")
    if token["call"]:
        return contexts["()"][token["call"]]
    if token["name"] in _CONSTANTS:
        return _CONSTANTS[token["name"]]
    value: Any = contexts
    for part in (token["name"] or "").split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
