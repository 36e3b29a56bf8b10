"""State of gated delta layers: what a running request keeps there instead of keys, by its slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from delivery.model import delta
from delivery.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerState:
    """conv [slots, K − 1, channels]: last inputs of the convolution. memory float32 [slots, value_heads,
    key_head_dim, value_head_dim]."""

    conv: torch.Tensor
    memory: torch.Tensor


def allocate(
    config: ModelConfig, slots: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[LayerState | None, ...]:
    """One LayerState per gated delta layer, for good; None for the other layers."""

    def layer(kind: str) -> LayerState | None:
        spec = config.delta
        if kind != "linear_attention" or spec is None:
            return None
        conv = (slots, spec.conv_kernel - 1, delta.channels(spec))
        memory = (slots, spec.num_value_heads, spec.key_head_dim, spec.value_head_dim)
        return LayerState(torch.zeros(conv, dtype=dtype, device=device), torch.zeros(memory, device=device))

    return tuple(layer(kind) for kind in config.layer_types)


@dataclass(frozen=True, slots=True)
class StateRows:
    """Whose state a step works on. slots int64 [B]: of its sequences. fresh bool [B]: begins at position 0.
    decodes: leading sequences with one token. lengths: tokens of the sequences behind them."""

    slots: torch.Tensor
    fresh: torch.Tensor
    decodes: int
    lengths: tuple[int, ...]


def run(
    config: ModelConfig,
    state: LayerState,
    rows: StateRows,
    x: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    kernel: torch.Tensor,
) -> torch.Tensor:
    """Continue sequences from their states, which are updated in place; see `Mixer.gated_delta`."""
    spec, n = config.delta, rows.decodes
    assert spec is not None
    conv, memory = state.conv[rows.slots], state.memory[rows.slots]
    conv = conv.masked_fill(rows.fresh[:, None, None], 0.0)
    memory = memory.masked_fill(rows.fresh[:, None, None, None], 0.0)
    mixed, tail = delta.convolve(x[:n, None], kernel, conv[:n])
    out, new = delta.step(*delta.heads_of(spec, mixed[:, 0]), decay[:n], beta[:n], memory[:n])
    outputs, tails, memories = [out], [tail], [new]
    start = n
    for index, length in enumerate(rows.lengths, n):
        at = slice(start, start + length)
        mixed, tail = delta.convolve(x[at], kernel, conv[index])
        out, new = delta.scan(*delta.heads_of(spec, mixed), decay[at], beta[at], memory[index])
        outputs.append(out)
        tails.append(tail[None])
        memories.append(new[None])
        start += length
    state.conv[rows.slots] = torch.cat(tails).to(state.conv.dtype)
    state.memory[rows.slots] = torch.cat(memories).to(state.memory.dtype)
    return torch.cat(outputs)
