"""The mixers of recorded steps on a CPU: attention over the paged cache as operations at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from delivery.engine.kv_cache import KVCache, RotaryTables
from delivery.engine.paged import StepInputs
from delivery.kernels.cpu import attention as cpu_attention
from delivery.kernels.cpu import prompt as cpu_prompt
from delivery.model.attention import scale_of, window_of
from delivery.model.config import ModelConfig


class RecordedAttention:
    """Attention of one query per row, or, given `work` (`prompt.WORK`), of any mixture of sequences."""

    def __init__(
        self, cache: KVCache, rotary: RotaryTables, inputs: StepInputs, work: torch.Tensor | None = None
    ) -> None:
        self._cache = cache
        self._rotary = rotary
        self._inputs = inputs
        self._work = work

    def attention(
        self,
        config: ModelConfig,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        positions: torch.Tensor,
        norms: Mapping[str, Any],
    ) -> Any:
        slots, keep = self._slots(config, layer, q, k, v)
        if config.qk_norm:
            for slot, name in ((cpu_attention.Q_NORM, "q_norm"), (cpu_attention.K_NORM, "k_norm")):
                slots[slot] = norms[name].effective.data_ptr()
                keep.append(norms[name].effective)
        out = q.recorder.buffer(config.num_heads * config.head_dim)
        if self._work is None:
            q.recorder.attention(slots, keep, self._rotary.length, out)
        else:
            slots[cpu_prompt.WORK] = self._work.data_ptr()
            q.recorder.prompt_attention(slots, [*keep, self._work], out)
        return out

    def _slots(
        self, config: ModelConfig, layer: int, q: Any, k: Any, v: Any
    ) -> tuple[dict[int, int], list[Any]]:
        cache, inputs = self._cache.layers[layer], self._inputs
        assert cache is not None
        cos, sin = self._rotary.tables[self._rotary.which(layer)]
        floats = torch.tensor([scale_of(config), config.attention_softcap or 0.0, config.rms_eps])
        slots = {
            cpu_attention.Q: q.address,
            cpu_attention.K: k.address,
            cpu_attention.V: v.address,
            cpu_attention.Q_STRIDE: q.stride,
            cpu_attention.KV_STRIDE: k.stride,
            cpu_attention.KV_HEADS: config.num_kv_heads,
            cpu_attention.GROUP: config.num_heads // config.num_kv_heads,
            cpu_attention.HEAD_DIM: config.head_dim,
            cpu_attention.HALF: cos.shape[1],
            cpu_attention.COS: cos.data_ptr(),
            cpu_attention.SIN: sin.data_ptr(),
            cpu_attention.ROPE_ROWS: inputs.rope_rows.data_ptr(),
            cpu_attention.K_CACHE: cache.k.data_ptr(),
            cpu_attention.V_CACHE: cache.v.data_ptr(),
            cpu_attention.BLOCK_SIZE: self._cache.block_size,
            cpu_attention.BLOCK_TABLE: inputs.block_table.data_ptr(),
            cpu_attention.TABLE_STRIDE: inputs.block_table.stride(0) * 4,
            cpu_attention.CONTEXT: inputs.context_lens.data_ptr(),
            cpu_attention.SLOTS: inputs.slot_mapping.data_ptr(),
            cpu_attention.FLOATS: floats.data_ptr(),
            cpu_attention.WINDOW: window_of(config, layer) or 0,
        }
        return slots, [cache.k, cache.v, cos, sin, floats, inputs]
