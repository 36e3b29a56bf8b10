"""PagedAttention: the engine's token mixer, over the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from delivery.engine.kv_cache import KVCache, RotaryTables
from delivery.engine.recurrent_state import StateRows, run
from delivery.kernels import OPS
from delivery.model.attention import scale_of, window_of
from delivery.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's inputs on the device: T tokens of B sequences, decodes first.

    token_ids int32 [T]; positions, rope_rows, slot_mapping int64 [T] (slot −1: not stored);
    block_table int32 [B, max_blocks]; query_start int32 [B + 1]; context_lens int32 [B];
    sample_rows int64 [S], the rows of T whose next token is sampled; token_slots int64 [T]. num_decodes:
    leading sequences with one token.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rope_rows: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    sample_rows: torch.Tensor
    token_slots: torch.Tensor
    num_decodes: int


class PagedAttention:
    """Rotates, stores keys and values at their slots, attends over the blocks of each sequence."""

    def __init__(self, cache: KVCache, rotary: RotaryTables, inputs: StepInputs) -> None:
        self._cache = cache
        self._which = rotary.which
        self._inputs = inputs
        self._rotary = rotary.rows(inputs.rope_rows)
        self._rows: StateRows | None = None

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
        cache, inputs = self._cache.layers[layer], self._inputs
        assert cache is not None
        cos, sin = self._rotary[self._which(layer)]
        head_norms, plus_one = (None, None), False
        if config.qk_norm:
            head_norms = (norms["q_norm"].weight, norms["k_norm"].weight)
            plus_one = norms["q_norm"].plus_one
        q, k = OPS["rope_cache_write"](
            q,
            k,
            v,
            cos,
            sin,
            inputs.slot_mapping,
            cache.k,
            cache.v,
            cache.k_scale,
            cache.v_scale,
            False,
            *head_norms,
            config.rms_eps,
            plus_one,
        )
        out: torch.Tensor = OPS["paged_attention"](
            q,
            cache.k,
            cache.v,
            inputs.block_table,
            inputs.query_start,
            inputs.context_lens,
            scale_of(config),
            window_of(config, layer),
            config.attention_softcap,
            cache.k_scale,
            cache.v_scale,
            inputs.num_decodes,
        )
        return out.flatten(1)

    def gated_delta(
        self,
        config: ModelConfig,
        layer: int,
        x: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        kernel: torch.Tensor,
    ) -> torch.Tensor:
        state = self._cache.states[layer]
        assert state is not None
        if self._rows is None:
            self._rows = self._state_rows()
        return run(config, state, self._rows, x, decay, beta, kernel)

    def _state_rows(self) -> StateRows:
        inputs = self._inputs
        first, decodes = inputs.query_start[:-1].long(), inputs.num_decodes
        lengths = inputs.query_start.diff()[decodes:].tolist() if decodes < first.numel() else ()
        return StateRows(inputs.token_slots[first], inputs.positions[first] == 0, decodes, tuple(lengths))
