"""GitLab's `rules:` for the local runner: expressions over variables, and globs of changed files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_TOKEN = re.compile(
    r"\s*(?:(?P<op>==|!=|=~|!~|&&|\|\||\(|\))|\$(?P<var>\w+)|\"(?P<dq>[^\"]*)\"|'(?P<sq>[^']*)'"
    r"|/(?P<re>(?:[^/\\]|\\.)+)/(?P<flags>i?)|(?P<null>null))"
)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$NAME` and `${NAME}` in a text of the definition; an unknown one is empty."""
    return _VARIABLE.sub(lambda m: variables.get(m[1] or m[2], ""), text)


def chosen(
    rules: Sequence[Mapping[str, Any]], variables: Mapping[str, str], changed: Sequence[str]
) -> Mapping[str, Any] | None:
    """The first rule that matches, None when none does."""
    for rule in rules:
        if unknown := rule.keys() - {"if", "changes", "when"}:
            raise ValueError(f"rules: {sorted(unknown)}")
        if "if" in rule and not holds(rule["if"], variables):
            continue
        if "changes" in rule and not any(glob(g).fullmatch(p) for g in rule["changes"] for p in changed):
            continue
        return rule
    return None


def glob(pattern: str) -> re.Pattern[str]:
    """A path glob as Ruby's File.fnmatch reads it with FNM_PATHNAME and FNM_DOTMATCH."""
    out = ""
    for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern):
        out += {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(part, re.escape(part))
    return re.compile(out)


def holds(expression: str, variables: Mapping[str, str]) -> bool:
    """Whether an `if:` is true. `&&` binds tighter than `||`."""
    tokens: list[tuple[str, Any]] = []
    at = 0
    while expression[at:].strip():
        found = _TOKEN.match(expression, at)
        if not found:
            raise ValueError(f"cannot read {expression[at:]!r}")
        at = found.end()
        if found["op"]:
            tokens.append(("op", found["op"]))
        elif found["var"]:
            tokens.append(("value", variables.get(found["var"])))
        elif found["re"]:
            tokens.append(("re", re.compile(found["re"], re.IGNORECASE if found["flags"] else 0)))
        else:
            tokens.append(("value", None if found["null"] else (found["dq"] or found["sq"] or "")))
    value = _either(tokens)
    if tokens:
        raise ValueError(f"{expression!r} goes on after its end")
    return value


def _either(tokens: list[tuple[str, Any]]) -> bool:
    value = _both(tokens)
    while tokens and tokens[0] == ("op", "||"):
        tokens.pop(0)
        value = _both(tokens) or value
    return value


def _both(tokens: list[tuple[str, Any]]) -> bool:
    value = _one(tokens)
    while tokens and tokens[0] == ("op", "&&"):
        tokens.pop(0)
        value = _one(tokens) and value
    return value


def _one(tokens: list[tuple[str, Any]]) -> bool:
    kind, left = tokens.pop(0)
    if (kind, left) == ("op", "("):
        value = _either(tokens)
        assert tokens.pop(0) == ("op", ")")
        return value
    if not tokens or tokens[0][1] not in ("==", "!=", "=~", "!~"):
        return bool(left)
    _, operator = tokens.pop(0)
    _, right = tokens.pop(0)
    if operator in ("==", "!="):
        return (left == right) is (operator == "==")
    return bool(left is not None and right.search(left)) is (operator == "=~")
