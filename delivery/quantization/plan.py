"""The plan: for every linear layer of a model, which scheme and which group size, before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from delivery.errors import UsageError
from delivery.model.families import family_named
from delivery.model.stored import find_root, stored_part
from delivery.quantization.driver import Planned
from delivery.quantization.eight_bit import BLOCK
from delivery.quantization.embedding import EmbeddingPlan
from delivery.quantization.group_size import GroupSizes, common_group_size, fit_group_size
from delivery.quantization.inputs import is_router, kind_of
from delivery.quantization.options import Options
from delivery.quantization.patterns import SKIP, matches, refuse_unused
from delivery.quantization.scheme import W4, Scheme, load_scheme

if TYPE_CHECKING:
    from delivery.model.config import ModelConfig
    from delivery.model.families.family import Family, Part
    from delivery.model.stored import Names
    from delivery.qtensor import QTensor

_ROW_PARALLEL = ("o_proj", "out_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Target:
    """One linear layer. name: canonical. prefix: in the checkpoint (several parts may share one).

    stored: prefix that it is written under; an expert of a stacked tensor gets a place of its own.
    planned: None for a layer that stays unquantised; note: why, or what differs from the request.
    """

    layer: int
    name: str
    prefix: str
    stored: str
    part: Part
    rows: int
    columns: int
    planned: Planned | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """All targets, in order of layers."""

    targets: tuple[Target, ...]
    plain: tuple[str, ...] = field(default=())
    """Prefixes of matrices outside the blocks that stay unquantised: the output head, a vision tower."""
    embedding: EmbeddingPlan | None = None
    """None where the embedding stays as it is."""
    embedding_note: str = ""

    def layer(self, layer: int) -> dict[str, Planned]:
        """Canonical name → what is planned, for one block."""
        return {t.name: t.planned for t in self.targets if t.layer == layer and t.planned is not None}

    def of_layer(self, layer: int) -> tuple[Target, ...]:
        return tuple(t for t in self.targets if t.layer == layer)

    def schemes(self) -> tuple[Scheme, ...]:
        found = {t.planned.scheme.name: t.planned.scheme for t in self.targets if t.planned is not None}
        return tuple(found.values())

    def prototypes(self, options: Options) -> dict[str, QTensor | None]:
        """Prefix → a QTensor without data, or None for an unquantised layer: the input of format checks."""
        sizes: dict[str, int] = {}
        for target in self.targets:
            sizes[target.stored] = sizes.get(target.stored, 0) + target.rows
        found: dict[str, QTensor | None] = {}
        for t in self.targets:
            if t.planned is None:
                found[t.stored] = None
            elif t.stored not in found:
                shape = sizes[t.stored], t.columns
                found[t.stored] = t.planned.scheme.prototype(shape, t.planned.group_size, options)
        if (table := self.embedding) is not None:
            shape = table.rows, table.columns
            found[table.prefix] = W4.prototype(shape, table.group_size, options.symmetric)
        return found | dict.fromkeys(self.plain)

    def notes(self) -> list[str]:
        """A sentence for every layer that is not quantised as requested, one per kind of layer and reason."""
        counted: dict[tuple[str, str], list[int]] = {}
        for t in self.targets:
            if t.note:
                kind = t.name if not t.name.startswith("experts.") else f"experts.*.{t.name.split('.')[-1]}"
                counted.setdefault((kind, t.note), []).append(t.layer)
        notes = [f"{kind} ({_layers(layers)}): {note}" for (kind, note), layers in counted.items()]
        if self.embedding_note:
            notes.append(self.embedding_note)
        if (others := len(self.plain) - 1) > 0:
            notes.append(f"{others} matrices outside the decoder, such as {self.plain[-1]}, stay as they are")
        return notes


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a user requests. recipe: pattern → scheme name or 'skip', later entries win.

    skip: patterns of unquantised layers. tensor_parallel: ranks that row-parallel layers are split over.
    single_size: one group size for all layers, for formats that know only one. weights: names of all
    matrices in the checkpoint, so that those outside the decoder (a vision tower) can be listed as plain.
    """

    scheme: str
    options: Options
    recipe: Mapping[str, str] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    tensor_parallel: int = 1
    single_size: bool = False
    weights: tuple[str, ...] = ()


def make_plan(
    config: ModelConfig, source: Names, shape: Callable[[str], tuple[int, ...]], wishes: Wishes
) -> ModelPlan:
    """The plan for a checkpoint, from its config and headers.

    shape: of a stored tensor, by name. Raises UsageError `unknown-scheme`, `recipe` for a pattern that
    matches nothing, `nothing-to-quantise`.
    """
    family = family_named(config.family)
    root = find_root(source, family)
    layers = _linear_layers(config, family, source, root, shape)
    sizes = wishes.options.group_sizes
    if wishes.single_size:
        one = common_group_size(sizes.attention, (layer.columns for layer in layers))
        sizes = GroupSizes(one, one, sizes.embedding)
    used: set[str] = set()
    targets = []
    for layer in layers:
        planned, note = _decide(layer, wishes, sizes, used)
        targets.append(replace(layer, planned=planned, note=note))
    _check_patterns(wishes, used, targets)
    heads = [h for h in family.heads if source.has(f"{h}.weight")] or ["lm_head"]
    known = {*(t.prefix for t in targets), f"{root}.{family.embed}", *heads}
    others = [n.removesuffix(".weight") for n in wishes.weights if n.endswith(".weight")]
    plain = (*heads, *(o for o in others if o not in known))
    table, note = _embedding(f"{root}.{family.embed}", shape, wishes.options.group_sizes.embedding)
    return ModelPlan(tuple(_agreeing(targets)), plain, table, note)


def _linear_layers(
    config: ModelConfig, family: Family, source: Names, root: str, shape: Callable[[str], tuple[int, ...]]
) -> list[Target]:
    """Every linear layer of the decoder, in order, nothing planned yet."""
    found = []
    for layer in range(config.num_layers):
        for name, part in family.linears(config, layer).items():
            stored, part = f"{root}.{part.prefix}", stored_part(source, root, part)
            prefix = f"{root}.{part.prefix}"
            rows, columns = _shape(part, prefix, shape)
            found.append(Target(layer, name, prefix, stored, part, rows, columns, None))
    return found


def _embedding(
    prefix: str, shape: Callable[[str], tuple[int, ...]], wish: int | None
) -> tuple[EmbeddingPlan | None, str]:
    if wish is None:
        return None, ""
    rows, columns = shape(f"{prefix}.weight")
    size = fit_group_size(wish, columns)
    if size is None:
        return None, f"{prefix}: left in floating point: groups of {wish} do not divide {columns} features"
    other = "" if size == wish else f" instead of {wish}"
    note = f"{prefix}: 4 bits in groups of {size}{other}, rounded to nearest"
    return EmbeddingPlan(prefix, rows, columns, size), note


def _decide(layer: Target, wishes: Wishes, sizes: GroupSizes, used: set[str]) -> tuple[Planned | None, str]:
    """What is planned for a layer, and a note; adds the patterns that matched it to `used`."""
    name, columns = layer.name, layer.columns
    scheme_name = wishes.scheme
    for pattern, wanted in (*wishes.recipe.items(), *((p, SKIP) for p in wishes.skip)):
        if matches(pattern, name, layer.stored):
            used.add(pattern)
            scheme_name = wanted
    if scheme_name == SKIP:
        return None, "left in floating point: skipped as asked"
    if is_router(name):
        return None, "left in floating point: it decides on experts, or on what a recurrence keeps"
    scheme = load_scheme(scheme_name)
    if scheme.storage.granularity == "block" and columns % BLOCK:
        # Loaders of all formats insist on it: the activations are quantised in blocks of the same size.
        return None, (
            f"left in floating point: blocks of {BLOCK} do not divide {columns} features;"
            f" --recipe '{_pattern(name)}=fp8-dynamic' quantises it per channel"
        )
    if not scheme.grouped:
        return Planned(scheme), ""
    wish = sizes.of(kind_of(name))
    asked = wishes.options.group_sizes.of(kind_of(name))
    shards = wishes.tensor_parallel if name.rsplit(".", 1)[-1] in _ROW_PARALLEL else 1
    size = fit_group_size(wish, columns, shards)
    across = f" on {shards} ranks" if shards > 1 else ""
    if size is None or (wishes.single_size and size != wish):
        return None, f"left in floating point: groups of {wish} do not divide {columns} features{across}"
    if size != asked:
        return Planned(scheme, size), f"groups of {size} instead of {asked} for {columns} features{across}"
    return Planned(scheme, size), ""


def _agreeing(targets: list[Target]) -> list[Target]:
    """Parts that a file fuses into one tensor are stored one way: all quantised alike, or none."""
    by_prefix: dict[str, list[Target]] = {}
    for target in targets:
        by_prefix.setdefault(target.prefix, []).append(target)
    for prefix, parts in by_prefix.items():
        if len({p.planned for p in parts}) > 1 and all(p.part.expert is None for p in parts):
            names = ", ".join(p.name for p in parts)
            raise UsageError(
                "recipe",
                f"{prefix} holds {names}, which are to be quantised differently",
                why="one stored tensor has one form",
                hint=f"give one rule for {prefix}",
            )
    return targets


def _check_patterns(wishes: Wishes, used: set[str], targets: list[Target]) -> None:
    unused = [p for p in (*wishes.recipe, *wishes.skip) if p not in used]
    refuse_unused(unused, [t.stored for t in targets])
    if all(t.planned is None for t in targets):
        raise UsageError(
            "nothing-to-quantise",
            "no linear layer is left to quantise",
            why=targets[0].note if targets else "the model has none",
            hint="check --skip, --recipe and --group-size",
        )


def _shape(part: Part, prefix: str, shape: Callable[[str], tuple[int, ...]]) -> tuple[int, int]:
    if part.expert is not None:
        stacked = shape(prefix)[1:]
        rows, columns = (stacked[1], stacked[0]) if part.transposed else (stacked[0], stacked[1])
    else:
        rows, columns = shape(f"{prefix}.weight")
    return (sum(map(len, part.rows)) if part.rows is not None else rows), columns


def _pattern(name: str) -> str:
    """A recipe pattern for this kind of layer, those of experts included."""
    return f"*{name.rsplit('.', 1)[-1]}"


def _layers(layers: list[int]) -> str:
    if len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
