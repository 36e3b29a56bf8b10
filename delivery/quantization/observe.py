"""Observe a block: inputs of its linear layers, keys and values of its attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from delivery.model.attention import Mixer, rope_of
from delivery.model.config import ModelConfig
from delivery.model.weights import BlockWeights
from delivery.quantization.inputs import InputGroup
from delivery.quantization.statistics import InputStatistics

SAMPLE_TOKENS = 512


@dataclass(slots=True)
class Watch:
    """One input under watch. sample: the first `SAMPLE_TOKENS` tokens that pass, or fewer."""

    statistics: InputStatistics
    keep_sample: bool
    sample: torch.Tensor | None = None

    def see(self, x: torch.Tensor) -> None:
        self.statistics.update(x)
        held = 0 if self.sample is None else self.sample.shape[0]
        if self.keep_sample and held < SAMPLE_TOKENS and x.shape[0]:
            new = x[: SAMPLE_TOKENS - held].detach()
            new = new[torch.isfinite(new).all(1)]
            self.sample = new.clone() if self.sample is None else torch.cat([self.sample, new])


@dataclass(frozen=True, slots=True)
class Watched:
    """A linear layer whose input is seen before it is used."""

    inner: Callable[[torch.Tensor], torch.Tensor]
    watch: Watch

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.watch.see(x)
        return self.inner(x)


def watch_inputs(
    weights: BlockWeights,
    groups: Iterable[InputGroup],
    device: torch.device,
    *,
    with_gram: bool,
    keep_samples: bool = False,
) -> tuple[BlockWeights, dict[str, Watch]]:
    """The block with one layer of every input group under watch, and the watches by the group's key."""
    watches, wrapped = {}, {}
    for group in groups:
        linear = weights.linears[group.key]
        features = linear.in_features  # type: ignore[attr-defined]
        watch = Watch(InputStatistics(features, device, with_gram=with_gram), keep_samples)
        watches[group.key] = watch
        wrapped[group.key] = Watched(linear, watch)
    return weights.with_linears(wrapped), watches


class WatchedAttention:
    """A mixer that notes the largest key and value of every head before it hands on.

    key_absmax, value_absmax: float32 [kv_heads]. Keys are seen before rotation; what is noted is the
    largest magnitude that a key's pairs can reach at any position, which is the length of the pair.
    """

    def __init__(self, kv_heads: int, device: torch.device) -> None:
        self.key_absmax = torch.zeros(kv_heads, device=device)
        self.value_absmax = torch.zeros(kv_heads, device=device)

    def around(self, inner: Mixer) -> Mixer:
        return _Around(inner, self)

    def see(self, config: ModelConfig, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        rotary_dim = rope_of(config, layer).rotary_dim
        first, second = k[..., :rotary_dim].float().chunk(2, dim=-1)
        largest = torch.hypot(first, second).amax(-1)
        if rotary_dim < k.shape[-1]:
            largest = torch.maximum(largest, k[..., rotary_dim:].float().abs().amax(-1))
        _raise_to(self.key_absmax, largest)
        _raise_to(self.value_absmax, v.float().abs().amax(-1))


@dataclass(frozen=True, slots=True)
class _Around:
    inner: Mixer
    watch: WatchedAttention

    def attention(
        self,
        config: ModelConfig,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        norms: Mapping[str, Any],
    ) -> torch.Tensor:
        self.watch.see(config, layer, norms["k_norm"](k) if config.qk_norm else k, v)
        return self.inner.attention(config, layer, q, k, v, positions, norms)

    def gated_delta(
        self,
        config: ModelConfig,
        layer: int,
        x: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        kernel: torch.Tensor,
    ) -> torch.Tensor:
        return self.inner.gated_delta(config, layer, x, decay, beta, kernel)


def _raise_to(held: torch.Tensor, seen: torch.Tensor) -> None:
    """held [heads] = max(held, finite maxima of seen [T, heads]), in place."""
    finite = torch.nan_to_num(seen, nan=0.0, posinf=0.0, neginf=0.0)
    if finite.shape[0]:
        torch.maximum(held, finite.amax(0), out=held)
