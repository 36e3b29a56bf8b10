"""Gated activation, with and without quantised output."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from delivery.kernels.gpu.overlap import gdc_launch_dependents, gdc_wait, overlaps
from delivery.kernels.gpu.rounding import sigmoid, to_quantised
from delivery.kernels.row_quant import Q_MAX, TINY


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """SiLU, or GELU exact or by tanh, of float32."""
    if ACTIVATION == "silu":
        share = sigmoid(gate)
    elif ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
    else:  # 0.5 (1 + tanh z) = sigmoid(2 z), which cannot overflow to NaN
        share = sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return gate * share


@triton.jit
def _gated(
    gate_up,
    out,
    stride,
    features,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + features + column, mask=inside, other=0.0).to(tl.float32)
    value = activate(gate, ACTIVATION) * up
    tl.store(out + row * features + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_quantised(
    gate_up,
    out,
    scale,
    stride,
    features,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    Q_MAX: tl.constexpr,
    TINY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < features
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + features + column, mask=inside, other=0.0).to(tl.float32)
    value = activate(gate, ACTIVATION) * up
    row_scale = tl.maximum(tl.max(tl.abs(value)), TINY) / Q_MAX
    tl.store(scale + row, row_scale)
    quantised = to_quantised(value * (1.0 / row_scale), Q_MAX, out.dtype.element_ty)
    tl.store(out + row * features + column, quantised, mask=inside)


def silu_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """See `delivery.kernels.silu_mul`. A row is cut into blocks, so that one row fills several programs."""
    rows, features = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, features, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(features))
    if rows:
        grid = (rows, triton.cdiv(features, block))
        overlap = overlaps(gate_up.device)
        _gated[grid](
            gate_up,
            out,
            gate_up.stride(0),
            features,
            BLOCK=block,
            ACTIVATION=activation,
            OVERLAP=overlap,
            launch_pdl=overlap,
            num_warps=4,
        )
    return out


def silu_mul_quant(
    gate_up: torch.Tensor, dtype: torch.dtype, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `delivery.kernels.silu_mul_quant`. A row stays in registers between maximum and division."""
    rows, features = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, features, dtype=dtype, device=gate_up.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=gate_up.device)
    block = triton.next_power_of_2(features)
    if rows:
        overlap = overlaps(gate_up.device)
        _gated_quantised[(rows,)](
            gate_up,
            out,
            scale,
            gate_up.stride(0),
            features,
            BLOCK=block,
            ACTIVATION=activation,
            Q_MAX=Q_MAX[dtype],
            TINY=TINY,
            OVERLAP=overlap,
            launch_pdl=overlap,
            num_warps=max(1, min(32, block // 1024)),
        )
    return out, scale
