"""Models: configs, checkpoint families, and the one decoder block.

The package loads lazily: configs and families need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delivery.model.attention import DenseAttention, Mixer
    from delivery.model.config import ModelConfig
    from delivery.model.decoder import block, embed, final_logits, stream
    from delivery.model.load import Ends, StateDict, load_block, load_config, load_ends
    from delivery.model.weights import BlockWeights, Fused, Linear, Norm, Projection

_HOME = {
    "ModelConfig": "config",
    "DenseAttention": "attention",
    "Mixer": "attention",
    "block": "decoder",
    "stream": "decoder",
    "embed": "decoder",
    "final_logits": "decoder",
    "Ends": "load",
    "StateDict": "load",
    "load_block": "load",
    "load_config": "load",
    "load_ends": "load",
    "BlockWeights": "weights",
    "Fused": "weights",
    "Linear": "weights",
    "Norm": "weights",
    "Projection": "weights",
}
__all__ = [
    "BlockWeights",
    "DenseAttention",
    "Ends",
    "Fused",
    "Linear",
    "Mixer",
    "ModelConfig",
    "Norm",
    "Projection",
    "StateDict",
    "block",
    "embed",
    "final_logits",
    "load_block",
    "load_config",
    "load_ends",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
