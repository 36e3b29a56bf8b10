"""InternLM3: Llama's names; its biases decide which class it becomes.

`qkv_bias` governs q, k and v, `bias` the other linear layers. Llama has both or neither on
attention; Qwen2 has only q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from delivery.checkpoint.layouts._config import renamed
from delivery.checkpoint.pieces import Piece
from delivery.errors import DataError

ARCHITECTURES = ("InternLM3ForCausalLM",)


def config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A LlamaConfig, or a Qwen2Config where only q, k and v have biases.

    Raises DataError `layout-unsupported` where only the others have.
    """
    qkv_bias, bias = bool(hf.get("qkv_bias", False)), bool(hf.get("bias", False))
    dropped = ("qkv_bias", "bias")
    if qkv_bias == bias:
        return renamed(hf, "LlamaForCausalLM", "llama", drop=dropped) | {
            "attention_bias": bias,
            "mlp_bias": bias,
        }
    if qkv_bias:
        return renamed(hf, "Qwen2ForCausalLM", "qwen2", drop=dropped) | {"use_sliding_window": False}
    raise DataError(
        "layout-unsupported",
        "this InternLM3 checkpoint has biases on all layers but q, k and v",
        why="bias is true and qkv_bias false, a form that was never published",
    )


def pieces(hf: Mapping[str, Any], names: Iterator[str]) -> Iterator[Piece]:
    """The tensors as they are."""
    return (Piece(name, name) for name in names)
