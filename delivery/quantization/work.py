"""BlockWork: one decoder block being quantised. Schemes read it, move scales in it and finish its layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from delivery.errors import DataError
from delivery.model.config import ModelConfig
from delivery.model.weights import BlockWeights, Linear, Norm
from delivery.qtensor import QTensor
from delivery.quantization import absorb
from delivery.quantization.inputs import InputGroup, input_groups, is_router
from delivery.quantization.options import Options
from delivery.quantization.statistics import InputStatistics

MIN_EXPERT_TOKENS = 32
"""Under so many tokens, an expert's own statistics say too little and it is rounded to nearest."""


@dataclass(slots=True)
class Layer:
    """A linear layer while its block is worked on.

    source: as loaded. weight: current float32 [N, K], scales moved in. bias: the current one.
    columns, rows: what the weight was multiplied by on its inputs [K], and divided by on its outputs [N];
    None for nothing. group_size: input features per scale for grouped schemes. result: when finished.
    """

    source: Linear
    weight: torch.Tensor
    bias: torch.Tensor | None
    group_size: int
    columns: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    result: QTensor | None = None

    @property
    def changed(self) -> bool:
        """Whether a scale was moved into or out of the weight."""
        return self.columns is not None or self.rows is not None

    def stored_weight(self) -> torch.Tensor:
        """The float weight [N, K] as a layer that is not quantised is stored: in its own dtype."""
        source = self.source.weight
        assert isinstance(source, torch.Tensor)
        return self.weight.to(source.dtype) if self.changed else source


class BlockWork:
    """A block's float weights, what passed through them, and what became of them.

    planned: canonical name → group size, for every layer that is to be quantised; all others stay as
    they are. statistics, samples: by key of the input group; sensitivity: by layer; only what the scheme
    needs is there.
    notes: sentences about fallbacks, for the report.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: BlockWeights,
        planned: Mapping[str, int],
        options: Options,
        statistics: Mapping[str, InputStatistics] | None = None,
        samples: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.config = config
        self.layer = layer
        self.options = options
        self.statistics = dict(statistics or {})
        self.samples = dict(samples or {})
        self.sensitivity: dict[str, torch.Tensor] = {}
        self.norms: dict[str, Norm] = dict(weights.norms)
        self.source_norms: dict[str, Norm] = dict(weights.norms)
        self.notes: list[str] = []
        self._source = weights
        self._active = frozenset(planned)
        self.layers: dict[str, Layer] = {}
        for name, linear in weights.linears.items():
            assert isinstance(linear, Linear)
            if isinstance(linear.weight, QTensor):
                raise DataError(
                    "already-quantised",
                    f"{linear.name} is already quantised",
                    why=f"its weights have {linear.weight.bits} bits",
                    hint="quantise the float checkpoint that it was made from",
                )
            if name in planned and not bool(torch.isfinite(linear.weight).all()):
                raise DataError(
                    "weight-not-finite",
                    f"{linear.name} holds NaN or infinity",
                    why="a scale for it would be NaN too, and so would the model",
                    hint="get the checkpoint again; deliver convert names every tensor that is not finite",
                )
            self.layers[name] = Layer(linear, linear.weight.float(), linear.bias, planned.get(name, -1))
        self.groups = input_groups(self.layers)

    def restrict(self, names: Iterable[str]) -> None:
        """From now on, work on these layers only (mixed recipes run one scheme after another)."""
        self._active = frozenset(names)

    def active(self, group: InputGroup) -> tuple[str, ...]:
        """The layers of a group that are to be quantised now."""
        return tuple(n for n in group.linears if n in self._active)

    def known(self, group: InputGroup) -> bool:
        """Whether enough tokens reached a group to trust its statistics; says so once where not."""
        found = self.statistics.get(group.key)
        tokens = 0 if found is None else found.tokens
        enough = tokens >= (1 if group.expert is None else MIN_EXPERT_TOKENS)
        if not enough:
            name = self.layers[group.key].source.name
            note = f"{name}: {tokens} calibration tokens reached it, so it is rounded to nearest"
            if note not in self.notes:
                self.notes.append(note)
        return enough

    def matter(self, group: InputGroup) -> torch.Tensor | None:
        """Weight of the squared error of each row of `joined`, float32 [ΣN]; None where it is not known."""
        names = self.active(group)
        if any(n not in self.sensitivity for n in names):
            return None
        found = []
        for name in names:
            # Rows that were divided for a later layer count as much as they do in the source model.
            rows = self.layers[name].rows
            found.append(self.sensitivity[name] if rows is None else self.sensitivity[name] * rows.square())
        return torch.cat(found)

    def joined(self, group: InputGroup) -> torch.Tensor:
        """The weights of a group's active layers, one after the other: float32 [ΣN, K]."""
        return torch.cat([self.layers[n].weight for n in self.active(group)])

    def movable(self, group: InputGroup, *, shared_heads: bool = True) -> bool:
        """Whether a scale can be moved out of a group's input.

        Every layer on it has to follow: all are to be quantised now, or are routers, which are
        multiplied in floating point. Layers in a skip list stay untouched, so they forbid it. What
        feeds through another layer needs equal widths; query heads that share values also share a
        scale, unless `shared_heads` is off, when v → o is refused in grouped-query attention.
        """
        names = set(self.active(group))
        if not names or any(n not in names and not is_router(n) for n in group.linears):
            return False
        if group.norm is not None:
            return group.norm in self.norms
        if group.rows_of is None or group.rows_of not in self._active:
            return False
        if (
            group.rows_of == "v_proj"
            and not shared_heads
            and self.config.num_heads != self.config.num_kv_heads
        ):
            return False
        return self._rows_fit(group)

    def move(self, group: InputGroup, scale: torch.Tensor) -> None:
        """Divide a group's input by scale [K] and multiply its layers by it; the block computes the same.

        Statistics and samples of the group follow.
        """
        if group.norm is not None:
            absorbed = absorb.into_norm(self.norms[group.norm], scale)
            self.norms[group.norm], scale = absorbed.norm, absorbed.scale
        else:
            assert group.rows_of is not None
            feeder = self.layers[group.rows_of]
            rows = self._rows_of(group, scale)
            feeder.weight, feeder.bias = absorb.into_rows(feeder.weight, feeder.bias, rows)
            feeder.rows = rows if feeder.rows is None else feeder.rows * rows
        for name in group.linears:
            layer = self.layers[name]
            layer.weight = absorb.into_columns(layer.weight, scale)
            layer.columns = scale if layer.columns is None else layer.columns * scale
        if group.key in self.statistics:
            self.statistics[group.key].divide(scale)
        if group.key in self.samples:
            self.samples[group.key] = self.samples[group.key] / scale.to(self.samples[group.key].dtype)

    def tied(self, group: InputGroup, scale: torch.Tensor) -> torch.Tensor:
        """The nearest scale to `scale` that what feeds the group can take (shared by query heads)."""
        if group.rows_of == "v_proj":
            c = self.config
            return absorb.shared_by_heads(scale, c.num_heads, c.num_kv_heads, c.head_dim)
        return scale

    def finish(self, name: str, qtensor: QTensor) -> None:
        """Set a layer's result. Raises DataError `weight-not-finite` with the tensor's name."""
        layer = self.layers[name]
        for part, tensor in (("scale", qtensor.scale), ("input_scale", qtensor.input_scale)):
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                raise DataError(
                    "weight-not-finite",
                    f"{layer.source.name}: quantising gives a {part} that is not finite",
                    why="the weight or its activations hold NaN or infinity",
                    hint="check the source checkpoint's tensor of that name",
                )
        layer.result = qtensor

    def _rows_fit(self, group: InputGroup) -> bool:
        assert group.rows_of is not None
        width = self.layers[group.key].source.in_features
        if group.rows_of != "v_proj":
            return self.layers[group.rows_of].source.out_features == width
        c = self.config
        return width == c.num_heads * c.head_dim and c.num_heads % c.num_kv_heads == 0

    def _rows_of(self, group: InputGroup, scale: torch.Tensor) -> torch.Tensor:
        if group.rows_of != "v_proj":
            return scale
        c = self.config
        return absorb.rows_of_values(scale, c.num_heads, c.num_kv_heads, c.head_dim)

    def float_block(self) -> BlockWeights:
        """The current block in float32: scales moved, nothing rounded; the same function as the source."""
        linears = {n: replace(a.source, weight=a.weight, bias=a.bias) for n, a in self.layers.items()}
        return replace(self._source.with_linears(linears), norms={**self._source.norms, **self.norms})


def coverage(work: BlockWork) -> list[str]:
    """A sentence about experts that too few calibration tokens reached; [] where all saw enough."""
    tokens = [work.statistics[g.key].tokens for g in work.groups if g.expert is not None]
    few = sum(t < MIN_EXPERT_TOKENS for t in tokens)
    if not few:
        return []
    return [
        f"layer {work.layer}: {few} of {len(tokens)} experts saw fewer than {MIN_EXPERT_TOKENS} calibration "
        f"tokens, {tokens.count(0)} of them none: calibrate on more text"
    ]
