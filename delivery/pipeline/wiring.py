"""Which earlier step an input role is bound to, and whether the kinds fit.

A role that the pipeline file leaves open is bound as `steps.step.takes` says: `source` to the origin
of what the step judges, a `many` role to all makers of the kind, any other to the nearest one.
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
    """A stage as wiring sees it."""

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
                f"{where}: step {stage_id!r} takes no input {name!r}",
                hint=did_you_mean(name, roles) if roles else "it takes no inputs at all",
            )
    bound: dict[str, tuple[Source, ...]] = {}
    # A default may look at the other roles (`source` at the engine's ancestors), so those given go first.
    for name, value in given.items():
        bound[name] = _given(stage_id, roles[name], value, earlier, where)
    for name, role in sorted(roles.items(), key=lambda item: item[0] == _ORIGIN or item[1].metadata["many"]):
        if name not in given:
            bound[name] = _default(role, roles, bound, earlier)
        if not bound[name] and not role.metadata["optional"] and not role.metadata["many"]:
            kind = role.metadata["kind"]
            raise UsageError(
                "missing-input",
                f"{where}: step {stage_id!r} lacks its input {name!r}",
                why=f"no earlier step makes a{'n' if kind == Kind.ENGINE else ''} {kind}",
                hint=f"put a step that does before it, or set inputs: {{{name}: ...}}",
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
            hint=did_you_mean(name, known) if known else "a step comes after those that it takes from",
        )
    made, wanted = known[name].step.makes, role.metadata["kind"]
    if made != wanted:
        raise UsageError(
            "wrong-kind",
            f"{where}: input {role.name!r} of {stage_id!r} cannot be {name!r}",
            why=f"expected a step that makes a {wanted}, got one that makes a {made}",
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
    if role.metadata["many"]:
        return tuple(Source(stage=node.id) for node in makers if _about_the_same(node, bound))
    if role.name == _ORIGIN:
        origin = _origin(kind, bound, earlier) or (makers[0] if makers else None)
        return (Source(stage=origin.id),) if origin else ()
    twin = any(r.name != role.name and r.metadata["kind"] == kind for r in roles.values())
    if role.metadata["optional"] and twin:
        return ()
    return (Source(stage=makers[-1].id),) if makers else ()


def _about_the_same(node: Node, bound: Mapping[str, tuple[Source, ...]]) -> bool:
    """Whether a report is about what the step takes: they name the same source wherever both have a role."""
    return all(
        node.sources[role] == bound[role] for role in node.sources if role in bound and role != _ORIGIN
    )


def _origin(kind: Kind, bound: Mapping[str, tuple[Source, ...]], earlier: Sequence[Node]) -> Node | None:
    """The ancestor of the bound inputs that makes the kind and was made from none of that kind."""
    nodes = {node.id: node for node in earlier}
    queue = [source.stage for sources in bound.values() for source in sources]
    seen: set[str] = set()
    while queue:
        name = queue.pop(0)
        if name in seen or name not in nodes:
            continue
        seen.add(name)
        node = nodes[name]
        parents = [s.stage for sources in node.sources.values() for s in sources]
        same_kind = [p for p in parents if p in nodes and nodes[p].step.makes == kind]
        if node.step.makes == kind and not same_kind:
            return node
        queue += parents
    return None
