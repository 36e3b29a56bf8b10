"""Triton kernels run in its interpreter where there is no GPU; it reads this before it is first imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny_checkpoint as tiny_model
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama directory; read it, never write to it."""
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))
