"""Eight-bit weights for W8A8 and W8A16: int8 per channel, FP8 per channel, per tensor or per block.

Scales are float32; FP8 casts to the nearest value of its grid, int8 rounds.
"""

from __future__ import annotations

import torch

from delivery.qtensor import FLOAT8, QTensor
from delivery.quantization.grid import INT8_CHANNEL, check_finite, round_to_grid, storable

BLOCK = 128


def limit(dtype: torch.dtype) -> float:
    """Largest magnitude on the grid of an 8-bit dtype: 127, 448 (e4m3fn) or 57344 (e5m2)."""
    return float(torch.finfo(dtype).max if dtype in FLOAT8 else torch.iinfo(dtype).max)


def int8_per_channel(weight: torch.Tensor, act_dtype: torch.dtype | None = torch.int8) -> QTensor:
    """weight [N, K] → int8 with one scale per output channel [N, 1] = absmax / 127.

    act_dtype: what activations are quantised to (int8), or None for W8A16.
    """
    q = round_to_grid(weight, INT8_CHANNEL)
    return QTensor(q.qdata, q.scale, None, -1, 8, act_dtype=act_dtype)


def fp8_per_channel(
    weight: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, act_dtype: torch.dtype | None = None
) -> QTensor:
    """weight [N, K] → FP8 with one scale per output channel [N, 1]; activations dynamic per token."""
    scale = _scale(weight.float().abs().amax(1, keepdim=True), dtype)
    return _cast(weight.float() / scale, scale, dtype, act_dtype=act_dtype or dtype)


def fp8_per_tensor(
    weight: torch.Tensor, input_absmax: float, dtype: torch.dtype = torch.float8_e4m3fn
) -> QTensor:
    """weight [N, K] → FP8 with one scale [1, 1], and a static activation scale [1] from `input_absmax`."""
    scale = _scale(weight.float().abs().amax().reshape(1, 1), dtype)
    absmax = torch.tensor([input_absmax], device=weight.device, dtype=torch.float32)
    return _cast(weight.float() / scale, scale, dtype, act_dtype=dtype, input_scale=_scale(absmax, dtype))


def fp8_per_block(weight: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> QTensor:
    """weight [N, K] → FP8 with one scale per 128 × 128 block [ceil(N/128), ceil(K/128)]."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = _scale(blocks.abs().amax((1, 3)), dtype)
    values = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return _cast(values, scale, dtype, act_dtype=dtype, block_size=BLOCK)


def _scale(absmax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = storable(absmax / limit(dtype), torch.float32)
    check_finite(scale)
    return scale


def _cast(
    values: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    act_dtype: torch.dtype,
    input_scale: torch.Tensor | None = None,
    block_size: int | None = None,
) -> QTensor:
    # Clamped first: a value half a step above the largest would become NaN in e4m3fn, inf in e5m2.
    qdata = values.clamp(-limit(dtype), limit(dtype)).to(dtype).contiguous()
    return QTensor(
        qdata=qdata,
        scale=scale,
        zero_point=None,
        group_size=-1,
        bits=8,
        input_scale=input_scale,
        act_dtype=act_dtype,
        block_size=block_size,
    )
