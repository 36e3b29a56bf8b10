"""Causal attention over whole sequences, without a cache: for calibration and evaluation.

What `block` asks of any mixer is `Mixer`; the engine's paged attention is the other one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.nn import functional

from delivery.model import delta
from delivery.model.config import ModelConfig, RopeSpec
from delivery.model.rope import Frequencies, cos_sin, frequencies, rotate

_QUERY_CHUNK = 1024  # bounds the score matrix of masked attention: heads × chunk × length


class Mixer(Protocol):
    """The token mixer of a block: it knows the sequences behind a flat batch of T tokens."""

    def gated_delta(
        self,
        config: ModelConfig,
        layer: int,
        x: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        kernel: torch.Tensor,
    ) -> torch.Tensor:
        """x [T, channels], before the convolution by kernel [channels, K]; decay and beta [T, value_heads]
        → [T, value_heads, value_head_dim], in float32 or wider. See `delta.py`."""
        ...

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
        """q [T, heads, head_dim], k, v [T, kv_heads, head_dim], not yet rotated → [T, heads · head_dim].

        norms: the block's; where the model has QK norms, `q_norm` and `k_norm` apply before the rotation.
        """
        ...


def rope_of(config: ModelConfig, layer: int) -> RopeSpec:
    """The rotary settings of a layer: sliding layers may have their own."""
    if config.local_rope is not None and config.layer_types[layer] == "sliding_attention":
        return config.local_rope
    return config.rope


def window_of(config: ModelConfig, layer: int) -> int | None:
    """Tokens that a layer sees, itself included; None for all."""
    return config.sliding_window if config.layer_types[layer] == "sliding_attention" else None


def scale_of(config: ModelConfig) -> float:
    return config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale


class DenseAttention:
    """Causal attention over a flat batch of sequences, each from its position 0.

    sequence_lengths: tokens per sequence, in batch order; or None to
    treat the whole batch as one sequence. Differentiable; any float dtype.
    """

    def __init__(self, sequence_lengths: list[int] | tuple[int, ...] | None = None) -> None:
        self.sequence_lengths = None if sequence_lengths is None else tuple(sequence_lengths)
        self._frequencies: dict[int, Frequencies] = {}
        self._tables: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def lengths(self, tokens: int) -> tuple[int, ...]:
        lengths = (tokens,) if self.sequence_lengths is None else self.sequence_lengths
        if sum(lengths) != tokens:
            raise ValueError(f"sequence_lengths add up to {sum(lengths)}, the batch has {tokens} tokens")
        return lengths

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
        lengths = self.lengths(q.shape[0])
        if config.qk_norm:
            q, k = norms["q_norm"](q), norms["k_norm"](k)
        cos, sin = self._rotary(rope_of(config, layer), positions, lengths)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        scale, window, softcap = scale_of(config), window_of(config, layer), config.attention_softcap
        outputs = [
            causal_attention(qs, ks, vs, scale, window, softcap)
            for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        ]
        return torch.cat(outputs).flatten(1)

    def gated_delta(
        self,
        config: ModelConfig,
        layer: int,
        x: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        kernel: torch.Tensor,
    ) -> torch.Tensor:
        spec, lengths = config.delta, self.lengths(x.shape[0])
        assert spec is not None
        outputs = []
        for part, g, b in zip(x.split(lengths), decay.split(lengths), beta.split(lengths), strict=True):
            before = x.new_zeros(spec.conv_kernel - 1, x.shape[1])
            mixed, _ = delta.convolve(part, kernel, before)
            state = x.new_zeros(spec.num_value_heads, spec.key_head_dim, spec.value_head_dim)
            outputs.append(delta.scan(*delta.heads_of(spec, mixed), g, b, state)[0])
        return torch.cat(outputs)

    def _rotary(
        self, spec: RopeSpec, positions: torch.Tensor, lengths: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # One mixer serves every layer of one batch, so the tables are formed once per rotary setting.
        key = (id(spec), positions.device)
        if key not in self._tables:
            freq = frequencies(spec)
            long = None
            if freq.switch is not None:
                counts = torch.tensor(lengths, device=positions.device)
                long = torch.repeat_interleave(counts > freq.switch, counts)
            self._tables[key] = cos_sin(freq, positions, long)
        return self._tables[key]


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """One sequence: q [T, heads, head_dim] are the last T of the S tokens in k and v [S, kv_heads, head_dim].

    → [T, heads, head_dim]. window: tokens seen, itself included. softcap: scores become
    cap · tanh(score / cap) (Gemma 2).
    """
    tokens, length = q.shape[0], k.shape[0]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if tokens == length and softcap is None and (window is None or window >= length):
        grouped = q.shape[1] != k.shape[1]
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return out[0].transpose(0, 1)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    columns = torch.arange(length, device=q.device)
    pieces = []
    for start in range(0, tokens, _QUERY_CHUNK):
        piece = q[:, :, start : start + _QUERY_CHUNK]
        rows = length - tokens + start + torch.arange(piece.shape[2], device=q.device)
        seen = columns <= rows[:, None]
        if window is not None:
            seen &= columns > rows[:, None] - window
        scores = (piece @ k.transpose(-1, -2)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32))
        pieces.append(weights.to(q.dtype) @ v)
    return torch.cat(pieces, dim=2)[0].transpose(0, 1)
