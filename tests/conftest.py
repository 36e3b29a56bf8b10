"""What has to be settled before torch and Triton are first imported, and a tiny model for all."""

from __future__ import annotations

import os
from pathlib import Path

# Tiny models gain nothing from a second thread, and OpenMP's threads wait for each other by spinning: beside
# other work, a second process of pytest included, they take many times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import tiny_checkpoint as tiny_model
import torch

# Triton kernels run in its interpreter where there is no GPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama directory; read it, never write to it."""
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))
