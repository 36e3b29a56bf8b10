"""Smoke suites: prompts and expectations on the answers, as data. The one schema of `smoke/*.yaml`.

version: 1
name: english
language: en                 # of every answer, unless a prompt says otherwise
judged: true                 # false: shown in the report, never failing
prompts:
  - id: capital              # unique
    kind: single             # single | multi | summary
    messages:                # an assistant message without content is answered by the model itself
      - {role: user, content: What is the capital of France?}
    max_tokens: 48
    expect:
      contains: [Paris]      # each of them, ignoring case; a list inside the list is "any of"
      regex: [...]           # each is found somewhere
      absent: [...]          # none of them appears
      words: [1, 60]         # at least, at most; characters for Chinese, Japanese and Thai
      json: true             # the answer is JSON; a list of names: an object with these keys
      language: en           # "" for any
      loops: false           # true: repetition is allowed
      ends: true             # false: may be cut at max_tokens
timing: {prompt: capital, max_tokens: 16}
reference: [...]             # texts whose perplexity is measured, against the limit `smoke_perplexity`
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from delivery.errors import UsageError, did_you_mean
from delivery.gate.outputs.language import LANGUAGES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSION = 1
KINDS = ("single", "multi", "summary")
ROLES = ("system", "user", "assistant")
_SUITE_KEYS = ("version", "name", "language", "judged", "prompts", "timing", "reference")
_PROMPT_KEYS = ("id", "kind", "messages", "max_tokens", "expect")
_EXPECT_KEYS = ("contains", "regex", "absent", "words", "json", "language", "loops", "ends")


@dataclass(frozen=True, slots=True)
class Expectation:
    """Expectations on an answer; the fields are those of the schema above."""

    contains: tuple[tuple[str, ...], ...] = ()
    regex: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    words: tuple[int, int] = (1, 1 << 20)
    json: bool | tuple[str, ...] = False
    language: str = ""
    loops: bool = False
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation and the expectation on its last answer."""

    id: str
    kind: str
    messages: tuple[Mapping[str, str | None], ...]
    max_tokens: int
    expect: Expectation


@dataclass(frozen=True, slots=True)
class Suite:
    """A named set of prompts; `timing` names the prompt of the ten runs and its output length."""

    name: str
    judged: bool
    prompts: tuple[Prompt, ...]
    timing_prompt: str = ""
    timing_tokens: int = 16
    reference: tuple[str, ...] = field(default=())

    def expectation(self, prompt_id: str) -> Expectation:
        return next(p.expect for p in self.prompts if p.id == prompt_id)


def parse_suite(data: Any, source: str) -> Suite:
    """A suite from its parsed file; `source` names it in errors. Raises UsageError `bad-suite`."""
    top = _mapping(data, source, _SUITE_KEYS)
    if top.get("version") != VERSION:
        raise _bad(source, f"version is {top.get('version')!r}, expected {VERSION}")
    language = _language(top.get("language", ""), source)
    prompts = tuple(_prompt(p, language, source) for p in _list(top.get("prompts"), f"{source}: prompts"))
    ids = [p.id for p in prompts]
    if not prompts or len(set(ids)) != len(ids):
        raise _bad(source, "prompts need ids that differ")
    timing = _mapping(top.get("timing") or {}, f"{source}: timing", ("prompt", "max_tokens"))
    timed = _text(timing.get("prompt", ids[0]), f"{source}: timing: prompt")
    if timed not in ids:
        raise _bad(source, f"timing: there is no prompt {timed!r}", did_you_mean(timed, ids))
    return Suite(
        name=_text(top.get("name", source), f"{source}: name"),
        judged=_flag(top.get("judged", True), f"{source}: judged"),
        prompts=prompts,
        timing_prompt=timed,
        timing_tokens=_whole(timing.get("max_tokens", 16), f"{source}: timing: max_tokens", least=1),
        reference=_texts(top.get("reference", []), f"{source}: reference"),
    )


def suite_from_json(data: Mapping[str, Any]) -> Suite:
    """A suite from `dataclasses.asdict` that went through JSON."""
    prompts = []
    for p in data["prompts"]:
        e = p["expect"]
        expect = Expectation(
            contains=tuple(tuple(c) for c in e["contains"]),
            regex=tuple(e["regex"]),
            absent=tuple(e["absent"]),
            words=(e["words"][0], e["words"][1]),
            json=tuple(e["json"]) if isinstance(e["json"], list) else bool(e["json"]),
            language=e["language"],
            loops=e["loops"],
            ends=e["ends"],
        )
        prompts.append(Prompt(p["id"], p["kind"], tuple(p["messages"]), p["max_tokens"], expect))
    return Suite(
        name=data["name"],
        judged=data["judged"],
        prompts=tuple(prompts),
        timing_prompt=data["timing_prompt"],
        timing_tokens=data["timing_tokens"],
        reference=tuple(data["reference"]),
    )


def _prompt(data: Any, language: str, source: str) -> Prompt:
    where = f"{source}: prompt {data.get('id', '?')!r}" if isinstance(data, dict) else f"{source}: a prompt"
    fields = _mapping(data, where, _PROMPT_KEYS)
    kind = str(fields.get("kind", "single"))
    if kind not in KINDS:
        raise _bad(where, f"kind {kind!r}", did_you_mean(kind, KINDS))
    messages = tuple(_message(m, where) for m in _list(fields.get("messages"), f"{where}: messages"))
    if not messages or messages[-1]["role"] != "user":
        raise _bad(where, "the last message is the user's, who waits for the answer")
    name = _text(fields.get("id"), f"{where}: id")
    max_tokens = _whole(fields.get("max_tokens", 64), f"{where}: max_tokens", least=1)
    expect = _expectation(fields.get("expect") or {}, language, f"{where}: expect")
    return Prompt(name, kind, messages, max_tokens, expect)


def _message(data: Any, where: str) -> dict[str, str | None]:
    fields = _mapping(data, f"{where}: a message", ("role", "content"))
    role, content = fields.get("role"), fields.get("content")
    if role not in ROLES or (content is None and role != "assistant"):
        raise _bad(where, f"a message has a role of {', '.join(ROLES)} and a content")
    text = None if content is None else _text(content, f"{where}: content", blank=True)
    return {"role": str(role), "content": text}


def _expectation(data: Any, language: str, where: str) -> Expectation:
    fields = _mapping(data, where, _EXPECT_KEYS)
    patterns = _texts(fields.get("regex", []), f"{where}: regex", blank=True)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise _bad(where, f"regex {pattern!r}: {error}") from error
    words = [_whole(n, f"{where}: words") for n in _list(fields.get("words", [1, 1 << 20]), where)]
    if len(words) != 2 or words[0] > words[1]:
        raise _bad(where, f"words is [least, most], got {words}")
    keys = fields.get("json", False)
    return Expectation(
        contains=tuple(_choices(c, where) for c in _list(fields.get("contains", []), where)),
        regex=patterns,
        absent=_texts(fields.get("absent", []), f"{where}: absent", blank=True),
        words=(words[0], words[1]),
        json=_texts(keys, f"{where}: json") if isinstance(keys, list) else _flag(keys, f"{where}: json"),
        language=_language(fields.get("language", language), where),
        loops=_flag(fields.get("loops", False), f"{where}: loops"),
        ends=_flag(fields.get("ends", True), f"{where}: ends"),
    )


def _choices(value: Any, where: str) -> tuple[str, ...]:
    """One text, or a list of which any will do."""
    choices = _texts(value if isinstance(value, list) else [value], f"{where}: contains", blank=True)
    if not choices:
        raise _bad(where, "contains: a list of alternatives is empty")
    return choices


def _language(code: Any, where: str) -> str:
    if code != "" and code not in LANGUAGES:
        raise _bad(where, f"language {code!r}", did_you_mean(str(code), LANGUAGES))
    return str(code)


def _text(value: Any, where: str, *, blank: bool = False) -> str:
    """A text; YAML reads an unquoted 42 as a number, which is taken as it is written."""
    known = isinstance(value, str | int | float) and not isinstance(value, bool)
    if not known or not (blank or str(value).strip()):
        raise _bad(where, f"expected a text, got {value!r}")
    if any("\ud800" <= c <= "\udfff" for c in str(value)):
        raise _bad(where, f"{value!r} has half of a surrogate pair, which is not a character")
    return str(value)


def _texts(values: Any, where: str, *, blank: bool = False) -> tuple[str, ...]:
    """blank: a line break or spaces will do, as of an answer in one line; not "", which every answer has."""
    if "" in (listed := _list(values, where)):
        raise _bad(where, "expected a text, got ''")
    return tuple(_text(value, where, blank=blank) for value in listed)


def _whole(value: Any, where: str, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _bad(where, f"expected a whole number of at least {least}, got {value!r}")
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _bad(where, f"expected true or false, got {value!r}")
    return value


def _mapping(data: Any, where: str, known: Sequence[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _bad(where, f"expected a mapping, got {data!r}")
    for key in data:
        if key not in known:
            raise _bad(where, f"unknown key {key!r}", did_you_mean(str(key), known))
    return dict(data)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _bad(where, f"expected a list, got {value!r}")
    return list(value)


def _bad(where: str, why: str, hint: str = "") -> UsageError:
    return UsageError("bad-suite", f"{where} is not a valid smoke suite", why=why, hint=hint)
