"""Which GPUs can run what a scheme makes: int8 from sm70, FP8 from sm89."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from delivery.errors import EnvironmentLacking
from delivery.qtensor import FLOAT8
from delivery.quantization.scheme import Storage

_INT8 = (7, 0)
_FP8 = (8, 9)


def why_not_hardware(storage: Storage, capability: tuple[int, int]) -> str | None:
    """Why a GPU of this compute capability cannot run the products of a scheme; None where it can."""
    needed = _FP8 if storage.weight in FLOAT8 else _INT8
    if capability >= needed:
        return None
    kind = "FP8" if storage.weight in FLOAT8 else "int8 and 4-bit"
    have, want = (f"sm{major}{minor}" for major, minor in (capability, needed))
    return f"{kind} weights need compute capability {want} or newer, this GPU has {have}"


def check_hardware(storages: Iterable[Storage], capability: tuple[int, int] | None = None) -> None:
    """Raises EnvironmentLacking `gpu-too-old`, before any work. capability: default the current GPU's."""
    found = torch.cuda.get_device_capability() if capability is None else capability
    for storage in storages:
        if reason := why_not_hardware(storage, found):
            raise EnvironmentLacking(
                "gpu-too-old",
                "this GPU cannot run the scheme that was asked for",
                why=reason,
                hint="--scheme awq-w4a16; or quantise for another machine with --device cpu",
            )
