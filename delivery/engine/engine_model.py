"""EngineModel: a checkpoint's weights in the forms that the engine computes with, on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from delivery.engine.forms_experts import ExpertLayers, QuantizedExperts, StackedExperts
from delivery.engine.merging import merge
from delivery.model.config import ModelConfig
from delivery.model.decoder import QKV, embed, final_logits
from delivery.model.load import WeightSource, load_block, load_ends
from delivery.model.weights import BlockWeights, Fused, GatedActivation, Linear, Norm

Run = Callable[[Any], torch.Tensor]


class Forms(Protocol):
    """How one kind of device computes: packed layers for its kernels, fused norms and activations."""

    dtype: torch.dtype

    def linear(self, layer: Linear) -> Run:
        """A layer packed for the device's kernels; x [T, K] → [T, N]."""
        ...

    def norm(self, norm: Norm, feeds: Sequence[Run]) -> Any:
        """A norm with `__call__` and `add`; feeds: the layers that read its result."""
        ...

    def gated(self, config: ModelConfig, feeds: Run | None) -> GatedActivation | None: ...

    def experts(
        self, config: ModelConfig, experts: Sequence[ExpertLayers]
    ) -> StackedExperts | QuantizedExperts | None:
        """All experts of a block as one; None where the device runs them one by one."""
        ...

    def table(self, table: torch.Tensor) -> torch.Tensor:
        """The embedding table as it is kept."""
        ...


@dataclass(frozen=True, slots=True)
class Embedding:
    """table [V, ≥ H], float; rows may be padded."""

    table: torch.Tensor
    dtype: torch.dtype

    def __call__(self, config: ModelConfig, token_ids: torch.Tensor) -> torch.Tensor:
        return embed(config, self.table, token_ids, self.dtype)[:, : config.hidden_size]


@dataclass(frozen=True, slots=True)
class Head:
    """The final norm and the head, in the device's forms."""

    norm: Any
    head: Any

    def __call__(self, config: ModelConfig, hidden: torch.Tensor) -> torch.Tensor:
        return final_logits(config, self.norm, self.head, hidden)


@dataclass(frozen=True, slots=True)
class EngineModel:
    """blocks: one BlockWeights per layer; linears that are part of a fused product are not held apart.

    Everything but the config is dataclasses of tensors, so an engine directory can hold it.
    """

    config: ModelConfig
    dtype: torch.dtype
    blocks: Sequence[BlockWeights]
    embedding: Embedding
    head: Head

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [T] → hidden [T, H]."""
        return self.embedding(self.config, token_ids)

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] → logits [S, V]."""
        return self.head(self.config, hidden)


def load_model(
    source: WeightSource,
    config: ModelConfig,
    device: torch.device,
    forms: Forms,
    progress: Callable[[], None] = lambda: None,
) -> EngineModel:
    """Read a checkpoint block by block; never more than one block is held in its stored form."""
    blocks = []
    for layer in range(config.num_layers):
        blocks.append(prepare(config, load_block(source, config, layer, device), forms))
        progress()
    ends = load_ends(source, config, device)
    table, head = forms.table(ends.table), ends.head
    if ends.tied and isinstance(head.weight, torch.Tensor):
        # Of the table as it is kept, so that a cast table is not held twice.
        head = replace(head, weight=table[:, : config.hidden_size])
    run = forms.linear(head)
    embedding = Embedding(table, forms.dtype)
    return EngineModel(config, forms.dtype, blocks, embedding, Head(forms.norm(ends.norm, [run]), run))


def prepare(config: ModelConfig, weights: BlockWeights, forms: Forms) -> BlockWeights:
    """A block in the device's forms: products of layers that read the same input, norms that feed them."""
    linears = {name: layer for name, layer in weights.linears.items() if isinstance(layer, Linear)}
    count = config.moe.num_experts if config.moe is not None and "router" in linears else 0
    apart = [_expert(linears, index) for index in range(count)]
    experts = forms.experts(config, apart) if apart else None
    if experts is not None:
        linears = {name: layer for name, layer in linears.items() if not name.startswith("experts.")}
    products: dict[tuple[str, ...], Fused] = {}
    for names in _groups(linears):
        merged = merge([linears[name] for name in names])
        if merged is not None:
            products[names] = Fused(forms.linear(merged), tuple(linears[n].out_features for n in names))
    joined = {name for names in products for name in names}
    runs = {name: forms.linear(layer) for name, layer in linears.items() if name not in joined}
    norms = {name: forms.norm(norm, _fed_by(name, products, runs)) for name, norm in weights.norms.items()}
    gated = forms.gated(config, runs.get("down_proj"))
    return replace(weights, linears=runs, norms=norms, products=products, gated=gated, experts=experts)


def _expert(linears: dict[str, Linear], index: int) -> ExpertLayers:
    gate, up, down = (linears[f"experts.{index}.{name}"] for name in ("gate_proj", "up_proj", "down_proj"))
    return gate, up, down


def _groups(linears: dict[str, Linear]) -> list[tuple[str, ...]]:
    groups: list[tuple[str, ...]] = [QKV] if "q_proj" in linears else []
    prefixes = [name.removesuffix("gate_proj") for name in linears if name.endswith("gate_proj")]
    return groups + [(f"{prefix}gate_proj", f"{prefix}up_proj") for prefix in prefixes]


_READERS = {"input_norm": QKV, "pre_mlp_norm": ("gate_proj", "up_proj")}


def _fed_by(norm: str, products: dict[tuple[str, ...], Fused], runs: dict[str, Run]) -> list[Run]:
    """The layers that read a norm's result, when those are all of its readers; [] otherwise."""
    names = _READERS.get(norm, ())
    if names in products:
        # A gate of attention reads what q, k and v read.
        beside = [runs["attn_gate"]] if norm == "input_norm" and "attn_gate" in runs else []
        return [products[names].run, *beside]
    return [runs[name] for name in names] if names and all(name in runs for name in names) else []
