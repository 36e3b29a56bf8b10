"""Scales of a quantised KV cache, from the largest keys and values that calibration saw.

The bundled engine forms its scales per token and head as it writes (int8, fp8, int4), so it needs
none of these; engines that read `k_scale` and `v_scale` from the checkpoint do, and would otherwise
use 1.0 without a word.
"""

from __future__ import annotations

from typing import Literal

import torch

KVDtype = Literal["int8", "int4", "fp8"]
KV_DTYPES: tuple[KVDtype, ...] = ("int8", "int4", "fp8")

_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}


def kv_scale(absmax: torch.Tensor, dtype: KVDtype) -> torch.Tensor:
    """absmax per head [kv_heads] → float32 [1], one scale for the tensor: absmax / largest value.

    1 when nothing was seen. The scale is what a stored value is multiplied by.
    """
    largest = absmax.float().max() if absmax.numel() else torch.zeros(())
    return torch.where(largest > 0, largest / _LARGEST[dtype], torch.ones_like(largest)).reshape(1).cpu()
