"""Which earlier step an input role is bound to, and whether the kinds fit.

A role that the pipeline file does not bind is bound by the rules listed in `steps.step.takes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivery.artifact import Kind
from delivery.errors import UsageError, did_you_mean
from delivery.steps.step import fields_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delivery.steps.step import Field

REF = "ref:"
_ORIGIN = "source"


@dataclass(frozen=True, slots=True)
class Source:
    """What a role is bound to: an earlier stage of the pipeline, or a reference into the store."""

    stage: str = ""
    ref: str = ""

    def __str__(self) -> str:
        return self.stage or f"{REF}{self.ref}"


@dataclass(frozen=True, slots=True)
class Node:
    """The parts of a stage that binding needs."""

    id: str
    step: type[Any]
    sources: Mapping[str, tuple[Source, ...]]


def wire(
    stage_id: str,
    step: type[Any],
    given: Mapping[str, str | Sequence[str] | None],
    earlier: Sequence[Node],
    where: str,
) -> dict[str, tuple[Source, ...]]:
    """Bind every role of a step; roles left unbound are optional ones.

    Raises UsageError `unknown-key` (no such role), `unknown-stage`, `wrong-kind`, `missing-input`;
    `where` is `file:line` of the step.
    """
    roles = {f.name: f for f in fields_of(step) if f.is_input}
    for name in given:
        if name not in roles:
            raise UsageError(
                "unknown-key",
                f"{where}: step {stage_id!r} has no input {name!r}",
                hint=did_you_mean(name, roles) if roles else "it has no inputs",
            )
    bound: dict[str, tuple[Source, ...]] = {}
    # A default may look at the other roles (`source` at the engine's ancestors), so those given go first.
    for name, value in given.items():
        bound[name] = _given(stage_id, roles[name], value, earlier, where)
    last = sorted(roles.values(), key=lambda role: role.name == _ORIGIN or role.metadata["many"])
    for name, role in ((role.name, role) for role in last):
        if name not in given:
            bound[name] = _default(role, roles, bound, earlier)
        if not bound[name] and not role.metadata["optional"] and not role.metadata["many"]:
            raise UsageError(
                "missing-input",
                f"{where}: step {stage_id!r}: input {name!r} is missing",
                why=f"no earlier step makes {_a(role.metadata['kind'])}",
                hint=f"add such a step before it, or set inputs: {{{name}: ...}}",
            )
    return {name: sources for name, sources in bound.items() if sources}


def _given(
    stage_id: str,
    role: Field,
    value: str | Sequence[str] | None,
    earlier: Sequence[Node],
    where: str,
) -> tuple[Source, ...]:
    names = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if len(names) > 1 and not role.metadata["many"]:
        raise UsageError(
            "wrong-type", f"{where}: input {role.name!r} of {stage_id!r} takes one step", why=f"got {names}"
        )
    return tuple(_source(stage_id, role, name, earlier, where) for name in names)


def _source(stage_id: str, role: Field, name: str, earlier: Sequence[Node], where: str) -> Source:
    if name.startswith(REF):
        return Source(ref=name.removeprefix(REF))
    known = {node.id: node for node in earlier}
    if name not in known:
        raise UsageError(
            "unknown-stage",
            f"{where}: input {role.name!r} of {stage_id!r}: no earlier step has the id {name!r}",
            hint=did_you_mean(name, known) if known else "a step comes after those that it depends on",
        )
    made, wanted = known[name].step.makes, role.metadata["kind"]
    if made != wanted:
        raise UsageError(
            "wrong-kind",
            f"{where}: input {role.name!r} of {stage_id!r} cannot be {name!r}",
            why=f"expected a step that makes {_a(wanted)}, got one that makes {_a(made)}",
        )
    return Source(stage=name)


def _default(
    role: Field,
    roles: Mapping[str, Field],
    bound: Mapping[str, tuple[Source, ...]],
    earlier: Sequence[Node],
) -> tuple[Source, ...]:
    kind: Kind = role.metadata["kind"]
    makers = [node for node in earlier if node.step.makes == kind]
    behind = _ancestors(bound, earlier)
    if role.metadata["many"]:
        if kind == Kind.REPORT:
            makers = [node for node in makers if _about_the_same(node, bound)]
        elif bound:
            makers = [node for node in makers if node.id in behind]
        return tuple(Source(stage=node.id) for node in makers)
    if role.name == _ORIGIN:
        origins = [n for n in makers if n.id in behind and not _made_from(kind, n, earlier)]
        origin = next(iter(origins or makers), None)
        return (Source(stage=origin.id),) if origin else ()
    twin = any(r.name != role.name and r.metadata["kind"] == kind for r in roles.values())
    if role.metadata["optional"] and twin:
        return ()
    return (Source(stage=makers[-1].id),) if makers else ()


def _about_the_same(node: Node, bound: Mapping[str, tuple[Source, ...]]) -> bool:
    """Whether a report is about the step's inputs: equal sources for all roles that both have."""
    shared = [role for role in node.sources if bound.get(role) and role != _ORIGIN]
    return all(node.sources[role] == bound[role] for role in shared)


def _made_from(kind: Kind, node: Node, earlier: Sequence[Node]) -> bool:
    """Whether a stage was itself made from something of the kind."""
    makers = {n.id for n in earlier if n.step.makes == kind}
    return any(s.stage in makers for sources in node.sources.values() for s in sources)


def _ancestors(bound: Mapping[str, tuple[Source, ...]], earlier: Sequence[Node]) -> set[str]:
    """Ids of the bound stages and of everything that they depend on."""
    nodes = {node.id: node for node in earlier}
    queue = [source.stage for sources in bound.values() for source in sources]
    seen: set[str] = set()
    while queue:
        name = queue.pop()
        if name in nodes and name not in seen:
            seen.add(name)
            queue += [s.stage for sources in nodes[name].sources.values() for s in sources]
    return seen


def _a(kind: Kind) -> str:
    return f"an {kind}" if kind == Kind.ENGINE else f"a {kind}"
