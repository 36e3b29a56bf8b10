"""Predicted memory of a process with a loaded engine, from the config alone. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivery.engine.need import need, recorded_bytes, state_bytes

if TYPE_CHECKING:
    from delivery.engine.options import EngineOptions
    from delivery.model.config import ModelConfig

CPU_RUNTIME_BYTES = 450_000_000
"""Memory of Python with torch and numba before any weight is read (measured)."""
HOST_RUNTIME_BYTES = 1_600_000_000
"""The same with a GPU: torch's CUDA libraries, the driver's context, compiled kernels (measured)."""
GPU_RUNTIME_BYTES = 900_000_000
"""GPU memory of a process beyond the plan (measured): context, kernels, allocator overhead."""
_STEP_TOKENS = 512
_CPU_ITEM, _GPU_ITEM = 4, 2
_KV_BITS = {"auto": 16, "int8": 8, "fp8": 8, "int4": 4}


@dataclass(frozen=True, slots=True)
class Loaded:
    """Bytes of a loaded model in host and GPU memory, without the fixed overhead of a process."""

    host_bytes: int
    gpu_bytes: int = 0

    def beside(self, other: Loaded) -> Loaded:
        """The sum: both loaded at the same time."""
        return Loaded(self.host_bytes + other.host_bytes, self.gpu_bytes + other.gpu_bytes)

    def or_else(self, other: Loaded) -> Loaded:
        """The maximum: loaded one after the other."""
        return Loaded(max(self.host_bytes, other.host_bytes), max(self.gpu_bytes, other.gpu_bytes))


def loaded(
    config: ModelConfig,
    stored_bytes: int,
    *,
    device: str,
    kv_tokens: int,
    options: EngineOptions,
    plain: bool,
) -> Loaded:
    """stored_bytes: size of the weights on disk. plain: neither quantised nor packed for a device yet, so
    they become float32 on a CPU and 16-bit on a GPU. kv_tokens: capacity of the KV cache."""
    stored_wide = config.dtype == "float32"
    if device == "cpu":
        heads = config.num_layers * 2 * config.num_kv_heads * config.head_dim
        logits = 2 * _STEP_TOKENS * config.vocab_size * _CPU_ITEM
        return Loaded(
            stored_bytes * (2 if plain and not stored_wide else 1) + kv_tokens * heads * _CPU_ITEM + logits
        )
    sequences, tokens = options.sequences(device), options.batched_tokens(device)
    wanted = need(
        config,
        weights_bytes=stored_bytes // 2 if plain and stored_wide else stored_bytes,
        block_size=options.block_size,
        token_head_bytes=config.head_dim * _KV_BITS[options.kv] // 8,
        tokens=tokens,
        sequences=sequences,
        max_model_len=options.max_model_len or config.max_position,
        item_bytes=_GPU_ITEM,
        state_bytes=state_bytes(config, sequences, _GPU_ITEM),
        graph_bytes=recorded_bytes(config, tokens, sequences, _GPU_ITEM),
    )
    fixed = wanted.weights_bytes + wanted.peak_bytes + wanted.overhead_bytes + wanted.state_bytes
    blocks = -(-kv_tokens // options.block_size)
    # A block's weights pass through host memory.
    return Loaded(stored_bytes // max(1, config.num_layers), fixed + blocks * wanted.block_bytes)
