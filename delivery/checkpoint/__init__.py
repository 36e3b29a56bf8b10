"""Checkpoints: reading, writing and verifying Hugging Face model directories.

Names load when they are used: nothing here imports torch until a tensor is touched.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delivery.checkpoint.header import TensorInfo
    from delivery.checkpoint.inspect import describe
    from delivery.checkpoint.reader import Checkpoint
    from delivery.checkpoint.tokenizer import Tokenizer
    from delivery.checkpoint.writer import CheckpointWriter

__all__ = ["Checkpoint", "CheckpointWriter", "TensorInfo", "Tokenizer", "describe"]

_HOMES = {
    "Checkpoint": "reader",
    "CheckpointWriter": "writer",
    "TensorInfo": "header",
    "Tokenizer": "tokenizer",
    "describe": "inspect",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
