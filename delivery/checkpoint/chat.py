"""Chat templates: a model's own Jinja template, rendered in a sandbox. No torch, no transformers.

The template comes with the checkpoint and is not trusted: it runs in Jinja's immutable sandbox, sees
plain JSON values only, and cannot store private names on a namespace.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from delivery.errors import DataError

Message = Mapping[str, Any]


def render(template: str, messages: Sequence[Message], **variables: Any) -> str:
    """The prompt text of a conversation.

    messages: role/content mappings; keys whose value is None are dropped, since templates test for
    presence. variables: tools, add_generation_prompt, special tokens (`bos_token`, ...).
    Raises DataError `chat-template-refused` with the template's own words, or `chat-template-damaged`.
    """
    plain = [{k: v for k, v in _plain(m).items() if v is not None} for m in messages]
    try:
        return _compile(template).render(messages=plain, **{k: _plain(v) for k, v in variables.items()})
    except _Refusal as error:
        raise DataError(
            "chat-template-refused", "the model's chat template refuses these messages", why=str(error)
        ) from error
    except _BROKEN as error:
        raise DataError(
            "chat-template-damaged",
            "the model's chat template cannot be rendered",
            why=f"{type(error).__name__}: {error}",
            hint="check chat_template in tokenizer_config.json or chat_template.jinja",
        ) from error


class _Refusal(Exception):
    """Raised by a template through `raise_exception`."""


_WRONG = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_BROKEN = (*_WRONG, RecursionError, MemoryError)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training masks; here its body is rendered as is."""

    tags = {"generation"}  # noqa: RUF012 - read by Jinja as declared in its base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that cannot carry private names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _check_public(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the private name {name!r}")


def _raise(message: str) -> NoReturn:
    raise _Refusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | int | float):
        base = next(t for t in (str, int, float) if isinstance(value, t))
        return base(value)
    if isinstance(value, Mapping):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return f"<{type(value).__name__}>"


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise,
        strftime_now=lambda pattern: datetime.now().strftime(pattern),
        namespace=_Namespace,
    )
    return environment.from_string(template)
