"""Symmetric quantisation of rows to 8 bits: the formula behind every fused "... and quantise" kernel.

scale = absmax / Q_MAX, q = x / scale; int8 rounds half to even, fp8 casts (which rounds the same way).
"""

from __future__ import annotations

import torch

Q_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
TINY = 1e-12
"""Smallest absmax that a scale is made from, so that an all-zero row divides by something."""


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] → (q [..., K] in `dtype`, scale float32 [..., 1]); float64 in, float64 scale out."""
    work = torch.promote_types(x.dtype, torch.float32)
    q_max = Q_MAX[dtype]
    scale = x.abs().amax(-1, keepdim=True).to(work).clamp(min=TINY) / q_max
    scaled = (x.to(work) / scale).clamp(-q_max, q_max)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def why_not_dtype(dtype: torch.dtype) -> str | None:
    """Why rows cannot be quantised to `dtype`."""
    return None if dtype in Q_MAX else f"activations quantise to int8 or fp8, not {dtype}"
