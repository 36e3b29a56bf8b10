"""Peak memory of layer-by-layer work: predicted from the config, and measured. No torch at import."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delivery.model.config import ModelConfig

_RUNTIME_BYTES = 500 << 20
_FLOAT = 4


def predict_peak_bytes(
    config: ModelConfig, tokens: int, sample_tokens: int, *, gram: bool, device: str = "cpu"
) -> int:
    """Bytes at the peak of calibrating (`gram` off) or quantising (on), on the device that computes.

    tokens: of all samples; sample_tokens: of the longest. Counted are one block in its stored form, in
    float32 and simulated, the hidden states, the activations of one piece, and when quantising the Gram
    matrices of one block and the temporaries of a search. On a CPU the Python process is in it.
    """
    hidden, inner = config.hidden_size, max(size for size, _ in _mlps(config))
    heads = config.num_heads * config.head_dim
    features = max(size * count for size, count in _mlps(config))
    widest = max(2 * inner, heads + 2 * config.num_kv_heads * config.head_dim)
    block = hidden * (2 * heads + 2 * config.num_kv_heads * config.head_dim) + 3 * hidden * features
    piece = max(sample_tokens, 8192 if device == "cuda" else 1024)
    activations = min(piece, tokens) * (3 * widest + 6 * hidden)
    streams = tokens * hidden
    total = 2 * block + block // 2 + streams + activations
    if gram:
        grams = 2 * hidden**2 + heads**2 + max(size**2 * count for size, count in _mlps(config))
        search = 4 * max(widest * hidden, hidden * inner) + 2 * max(hidden, inner) ** 2
        total += grams + search + 4096 * hidden + block + block // 2
    table = config.vocab_size * hidden * 2
    return total * _FLOAT + table + (_RUNTIME_BYTES if device == "cpu" else 0)


def block_bytes(config: ModelConfig) -> int:
    """What one block takes as it is stored, and the embedding: read into the host's memory on their way."""
    hidden, heads = config.hidden_size, 2 * config.num_heads + 2 * config.num_kv_heads
    features = max(size * count for size, count in _mlps(config))
    width = 4 if config.dtype == "float32" else 2
    return width * hidden * (heads * config.head_dim + 3 * features + config.vocab_size)


def quantized_bytes(config: ModelConfig, size_bytes: int, bits: int) -> int:
    """About what a checkpoint of `size_bytes` takes with its decoder's weights at `bits` and scales."""
    features = max(size * count for size, count in _mlps(config))
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    weights = config.num_layers * config.hidden_size * (heads * config.head_dim + 3 * features)
    width = 4 if config.dtype == "float32" else 2
    return max(0, size_bytes - weights * width) + weights * (bits + 1) // 8


def peak_bytes(device: str) -> int | None:
    """The highest memory so far: of the process on a CPU, of torch's allocator on a GPU; None if unknown."""
    if device.startswith("cuda"):
        return int(sys.modules["torch"].cuda.max_memory_allocated())
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"))
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def gigabytes(size_bytes: float | None) -> str:
    """A human-readable size: `1.2 GB`, or `unknown`."""
    return "unknown" if size_bytes is None else f"{size_bytes / 1e9:.1f} GB"


def _mlps(config: ModelConfig) -> list[tuple[int, int]]:
    """(inner features, how many of that size one block has) of the kinds of MLP in a model."""
    moe = config.moe
    if moe is None:
        return [(config.intermediate_size, 1)]
    shared = -(-moe.shared_intermediate_size // moe.intermediate_size)
    routed = (moe.intermediate_size, moe.num_experts + shared)
    return [routed] if len(moe.layers) == config.num_layers else [routed, (config.intermediate_size, 1)]
