"""Which linear layers of a block read the same input, and what feeds it.

Layers on one input share their statistics and, where a scale is moved, that scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from delivery.quantization.group_size import LayerKind

_BEFORE_ATTENTION = "input_norm"
_BEFORE_MLP = "pre_mlp_norm"


@dataclass(frozen=True, slots=True)
class InputGroup:
    """Linear layers that read one tensor.

    key: the name of the layer whose input is watched. linears: canonical names, `key` among them.
    norm: the norm that feeds them, or None. rows_of: the linear layer whose outputs reach them channel
    by channel (v → o, up → down), or None. expert: index of the expert, whose tokens are few.
    """

    key: str
    linears: tuple[str, ...]
    norm: str | None = None
    rows_of: str | None = None
    expert: int | None = None


def input_groups(linears: Iterable[str]) -> tuple[InputGroup, ...]:
    """The groups of one block, from the canonical names of its linear layers.

    Names that this table does not know form groups of their own that nothing feeds, so that they are
    quantised without scales being moved.
    """
    names = list(linears)
    groups: list[InputGroup] = []
    taken: set[str] = set()

    def add(group: InputGroup) -> None:
        groups.append(group)
        taken.update(group.linears)

    attention = tuple(n for n in names if n in ("q_proj", "k_proj", "v_proj", "attn_gate"))
    # Linear attention (gated delta rule) reads the same norm through projections named in_proj_*.
    attention += tuple(n for n in names if n.startswith("in_proj"))
    if attention:
        add(InputGroup(attention[0], attention, norm=_BEFORE_ATTENTION))
    if "o_proj" in names:
        add(InputGroup("o_proj", ("o_proj",), rows_of="v_proj" if "v_proj" in names else None))
    routed = [n for n in names if n.startswith("experts.")]
    shared = [n for n in names if n.startswith("shared_expert.")]
    dense = [n for n in ("gate_proj", "up_proj") if n in names]
    heads = [n for n in ("router", "shared_expert_gate") if n in names]
    into = [*heads, *dense, *(n for n in (*shared, *routed) if not n.endswith("down_proj"))]
    if into:
        add(InputGroup(into[0], tuple(into), norm=_BEFORE_MLP))
    for name in names:
        if name.endswith("down_proj"):
            up = f"{name.removesuffix('down_proj')}up_proj"
            add(InputGroup(name, (name,), rows_of=up if up in names else None, expert=expert_of(name)))
    for name in names:
        if name not in taken:
            add(InputGroup(name, (name,)))
    return tuple(groups)


def expert_of(name: str) -> int | None:
    """The index in `experts.<index>.<layer>`; None for a layer that every token passes."""
    return int(name.split(".")[1]) if name.startswith("experts.") else None


def kind_of(name: str) -> LayerKind:
    """Whether a layer belongs to attention or to the MLP."""
    return "mlp" if name.rsplit(".", 1)[-1] in ("gate_proj", "up_proj", "down_proj") else "attention"


def is_router(name: str) -> bool:
    """Layers that choose or weigh experts, or what a recurrence keeps and takes in: tiny, sensitive, always
    kept in floating point."""
    return name in ("router", "shared_expert_gate", "in_proj_a", "in_proj_b")
