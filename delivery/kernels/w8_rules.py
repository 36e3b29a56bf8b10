"""Which cards multiply 8-bit numbers: int8 from compute capability 7.0, fp8 from 8.9."""

from __future__ import annotations

from functools import cache

import torch

OLDEST = {torch.int8: (7, 0), torch.float8_e4m3fn: (8, 9), torch.float8_e5m2: (8, 9)}


def why_not_dtype_on(dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Why a card of a compute capability cannot multiply numbers of `dtype`."""
    oldest = OLDEST.get(dtype)
    if oldest is None:
        return f"{dtype} is not an 8-bit type that is multiplied here"
    if capability < oldest:
        name = str(dtype).removeprefix("torch.")
        return (
            f"{name} needs compute capability {oldest[0]}.{oldest[1]}, "
            f"this card has {capability[0]}.{capability[1]}"
        )
    return None


def why_not_dtype_here(dtype: torch.dtype, device: torch.device) -> str | None:
    """The same for a device; a CPU takes every type."""
    if device.type != "cuda":
        return None
    return why_not_dtype_on(dtype, _capability(device.index or 0))


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
