"""The tensors of the paged KV cache, and the rotary tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from delivery.engine import recurrent_state
from delivery.kernels.kv_layout import kv_layout
from delivery.model.attention import rope_of
from delivery.model.config import ModelConfig, RopeSpec
from delivery.model.rope import cos_sin, frequencies


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer [num_blocks, block_size, kv_heads, stored_dim]; scales where quantised."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


class KVCache:
    """One LayerCache per attention layer, allocated once. layers[i] is None where layer i keeps no keys.

    states[i]: of gated delta layers, for `slots` requests; None where layer i has none.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        kv: str,
        dtype: torch.dtype,
        device: torch.device | str,
        slots: int = 0,
    ) -> None:
        layout = kv_layout(kv)
        self.num_blocks = num_blocks
        self.block_size = block_size

        def layer(kind: str) -> LayerCache | None:
            if kind == "linear_attention":
                return None
            shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
            k, k_scale = layout.allocate(*shape, dtype, device)
            v, v_scale = layout.allocate(*shape, dtype, device)
            return LayerCache(k, v, k_scale, v_scale)

        self.layers = tuple(layer(kind) for kind in config.layer_types)
        self.states = recurrent_state.allocate(config, slots, dtype, device)

    def size_bytes(self) -> int:
        tensors = (t for c in self.layers if c for t in (c.k, c.v, c.k_scale, c.v_scale) if t is not None)
        return sum(t.numel() * t.element_size() for t in tensors)


class RotaryTables:
    """Cosines and sines of every position, float32 [rows, rotary_dim / 2] per rotary setting.

    With LongRoPE the long factors' rows follow the short ones': row = position + long · length.
    """

    def __init__(self, config: ModelConfig, length: int, device: torch.device | str) -> None:
        self.length = length
        self.switch: int | None = None
        specs: list[RopeSpec] = []
        self._index: list[int] = []
        for layer in range(config.num_layers):
            spec = rope_of(config, layer)
            if spec not in specs:
                specs.append(spec)
            self._index.append(specs.index(spec))
        self.tables = [self._table(spec, device) for spec in specs]

    def _table(self, spec: RopeSpec, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        freq = frequencies(spec)
        positions = torch.arange(self.length)
        if freq.long is None:
            cos, sin = cos_sin(freq, positions)
        else:
            self.switch = freq.switch
            twice = positions.repeat(2)
            cos, sin = cos_sin(freq, twice, torch.arange(2 * self.length) >= self.length)
        return cos.to(device).contiguous(), sin.to(device).contiguous()

    def which(self, layer: int) -> int:
        """Index into `tables` of the setting that a layer uses."""
        return self._index[layer]

    def rows(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per setting, cosine and sine of int64 rows [T]."""
        return [(cos[rows], sin[rows]) for cos, sin in self.tables]
