"""The shapes that a config implies for a model's weights, to hold stored ones against. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from delivery.errors import DataError

if TYPE_CHECKING:
    from delivery.model.config import ModelConfig
    from delivery.model.families.family import Family

_OF_MODEL = ("input_norm", "pre_mlp_norm", "post_attention_norm", "post_mlp_norm")
"""Norms over the hidden features."""


def linear_shape(config: ModelConfig, name: str) -> tuple[int, int] | None:
    """(output, input features) of the linear layer with this canonical name; None where it is not known."""
    hidden, kind = config.hidden_size, name.rsplit(".", 1)[-1]
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    known = {
        "q_proj": (heads, hidden),
        "attn_gate": (heads, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, heads),
    }
    if config.moe is not None:
        known["router"] = (config.moe.num_experts, hidden)
        known["shared_expert_gate"] = (1, hidden)
    size = config.intermediate_size
    if config.moe is not None and name.startswith("experts."):
        size = config.moe.intermediate_size
    elif config.moe is not None and name.startswith("shared_expert."):
        size = config.moe.shared_intermediate_size
    known |= {"gate_proj": (size, hidden), "up_proj": (size, hidden), "down_proj": (hidden, size)}
    return known.get(kind)


def norm_shape(config: ModelConfig, name: str) -> tuple[int] | None:
    """Shape of the norm with this canonical name; None where it is not known."""
    return (config.hidden_size,) if name in _OF_MODEL else None


def stored_shapes(
    family: Family, config: ModelConfig, root: str, has: Callable[[str], bool]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every weight that is stored as a plain matrix or norm and whose shape is known.

    A tensor of which several layers take rows (QKV, gate and up) has the rows of all of them.
    """
    for layer in range(config.num_layers):
        rows: dict[str, int] = {}
        columns: dict[str, int] = {}
        for name, part in family.linears(config, layer).items():
            stored, shape = f"{root}.{part.prefix}.weight", linear_shape(config, name)
            if shape is None or not has(stored):
                continue
            rows[stored] = rows.get(stored, 0) + (sum(map(len, part.rows)) if part.rows else shape[0])
            columns[stored] = shape[1]
        yield from ((stored, (rows[stored], columns[stored])) for stored in rows)
        for name, tensor in family.norms(config, layer).items():
            if (size := norm_shape(config, name)) is not None and has(f"{root}.{tensor}"):
                yield f"{root}.{tensor}", size
    if has(f"{root}.{family.norm}"):
        yield f"{root}.{family.norm}", (config.hidden_size,)


def shape_disagrees(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> DataError:
    """What is raised for a weight whose shape is not what the config implies."""
    return DataError(
        "shape-disagrees",
        f"tensor {name!r} has another shape than its config implies",
        why=f"expected {list(wanted)}, got {list(found)}",
        hint="take config.json and the weights from the same revision of the model",
    )


def vocabulary_disagrees(name: str, rows: int, wanted: int) -> DataError:
    """What is raised for an embedding table or head with fewer rows than the vocabulary has tokens."""
    return DataError(
        "shape-disagrees",
        f"tensor {name!r} has fewer rows than the vocabulary has tokens",
        why=f"expected {wanted} (vocab_size), got {rows}",
        hint="take config.json and the weights from the same revision of the model",
    )
