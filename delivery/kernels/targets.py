"""Where a backend can run: the sentences that `why_not` gives for the device of a call's first tensor."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

OLDEST_CAPABILITY = (8, 0)
"""Compute capability that the Triton kernels need: bf16 tensor cores and asynchronous copies."""


def why_not_cpu(x: torch.Tensor, *_args: object, **_kwargs: object) -> str | None:
    """Why the CPU backend cannot take x."""
    return None if x.device.type == "cpu" else f"the tensor is on {x.device}"


def why_not_triton(x: torch.Tensor, *_args: object, **_kwargs: object) -> str | None:
    """Why a Triton kernel cannot take x: no triton, an older card, or the CPU without the interpreter."""
    if not _has_triton():
        return "triton is not installed (pip install 'deliver[gpu]')"
    if x.device.type == "cpu":
        return None if os.environ.get("TRITON_INTERPRET") == "1" else "the tensor is on the CPU"
    if x.device.type != "cuda":
        return f"the tensor is on {x.device}"
    if (capability := _capability(x.device.index or 0)) < OLDEST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is under 8.0"
    return None


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def has_bulk_copies(device: torch.device) -> bool:
    """Whether kernels may load tiles with the bulk copy engine: Hopper on, and the interpreter."""
    return device.type != "cuda" or _capability(device.index or 0) >= (9, 0)


@cache
def shared_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of shared memory that one program, and all programs of a multiprocessor, may use."""
    if device.type != "cuda":
        return 227 << 10, 228 << 10
    from triton.runtime import driver

    most = int(driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])
    return most, most + 1024  # of every card so far, one KiB is the system's


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a handful for the CPU's interpreter."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
