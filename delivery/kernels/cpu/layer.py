"""A CPU linear layer as an operation of a program, and alone on tensors of any number of rows."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch

from delivery.device import usable_cores
from delivery.kernels.cpu import linear as op
from delivery.kernels.cpu.pack import CHUNK, PackedCpu
from delivery.kernels.cpu.program import PIECES, PREPARE, RUN, SLOTS, Crew, Program

SMALL_ROWS = 32
"""Up to here rows are multiplied with weights as they are stored; beyond, with weights that were expanded
once for all of them."""
_EXPANDED_FLOATS = 1 << 22
_FORMS = {
    "float_weights": ("float32", "bfloat16", "float16"),
    "byte_weights": ("int8", "float8_e5m2", "float8_e4m3fn"),
    "w4_weights": ("w4_half", "w4_float"),
}
"""Module → the stored forms that it computes with, in the order of their numbers there."""
_GRAIN = 32
_QUANT = {
    None: op.NO_QUANT,
    torch.int8: op.QUANT_INT8,
    torch.float8_e4m3fn: op.QUANT_E4M3,
    torch.float8_e5m2: op.QUANT_E5M2,
}
_GLU = {"": op.NO_GLU, "silu": op.SILU, "gelu_tanh": op.GELU_TANH, "gelu": op.GELU}


@cache
def _format(form: str) -> tuple[Any, int]:
    """The module that computes with a stored form, and the form's number in it; compiled when first used."""
    for name, kinds in _FORMS.items():
        if form in kinds:
            return import_module(f"delivery.kernels.cpu.{name}"), kinds.index(form)
    raise ValueError(f"no CPU form {form!r}")


@cache
def crew() -> Crew:
    """The process's threads: as many as torch uses, no more than there are cores."""
    return Crew(max(1, min(usable_cores(), torch.get_num_threads())))


def padded(features: int) -> int:
    return -(-features // CHUNK) * CHUNK


def operation(
    packed: PackedCpu, x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, glu: str = ""
) -> list[int]:
    """The operation out = x · Wᵀ + b, or act(gate) · up with `glu`, for packed rows gate then up.

    x float32 [M, padded K], zero beyond K; out float32 [M, ≥ N]; scratch uint8 [threads, bytes], at least
    `scratch_bytes`.
    """
    n, k = packed.shape
    pieces = grain(n, k)
    quant = _QUANT[packed.act_dtype]
    as_is = quant == op.NO_QUANT and packed.zero is None and packed.order is None
    return slots_of(
        {
            **_weight(packed),
            RUN: op.run.address,
            PREPARE: 0 if as_is else op.prepare.address,
            PIECES: op.pieces(n, pieces, _GLU[glu]),
            op.PRODUCTS: _format(packed.form)[0].products.address,
            op.X: x.data_ptr(),
            op.X_STRIDE: x.stride(0) * 4,
            op.M: x.shape[0],
            op.BIAS: _address(packed.bias),
            op.OUT: out.data_ptr(),
            op.OUT_STRIDE: out.stride(0) * 4,
            op.QUANT: quant,
            op.INPUT_SCALE: _address(packed.input_scale),
            op.GLU: _GLU[glu],
            op.GRAIN: pieces,
            op.ORDER: _address(packed.order),
            op.SCRATCH: scratch.data_ptr(),
            op.SCRATCH_BYTES: scratch.stride(0),
        }
    )


def slots_of(values: dict[int, int]) -> list[int]:
    """An operation's slots from those that are not 0."""
    slots = [0] * SLOTS
    for slot, value in values.items():
        slots[slot] = value
    return slots


def scratch_bytes(packed: PackedCpu, rows: int) -> int:
    """Scratch that one thread needs for `rows` rows, whole cache lines."""
    n, k = packed.shape
    groups = 1 if packed.zero is None else packed.zero.shape[1]
    return -(-op.scratch_bytes(rows, k, groups, grain(n, k)) // 64) * 64


def grain(n: int, k: int) -> int:
    """Output features of one claimed piece: long enough to be worth a claim, short enough to share out."""
    return max(8, min(256, _GRAIN * 576 // max(k, 1) * 2, -(-n // (4 * crew().threads))))


def linear(packed: PackedCpu, x: torch.Tensor) -> torch.Tensor:
    """x float32 [M, K] → [M, N]."""
    rows, n = x.shape[0], packed.shape[0]
    if rows == 0:
        return x.new_empty(0, n)
    if rows > SMALL_ROWS:
        return _large(packed, x)
    if padded(x.shape[1]) != x.shape[1] or x.stride(1) != 1:
        wide = x.new_zeros(rows, padded(x.shape[1]))
        wide[:, : x.shape[1]] = x
        x = wide
    out = x.new_empty(rows, n)
    scratch = torch.empty(crew().threads, scratch_bytes(packed, rows), dtype=torch.uint8)
    crew().run(Program([operation(packed, x, out, scratch)], [packed, x, out, scratch]))
    return out


def _large(packed: PackedCpu, x: torch.Tensor) -> torch.Tensor:
    """Many rows: weights as float32, a cache-sized piece at a time, and torch's matrix product."""
    n, k = packed.shape
    x = x if packed.order is None else x[:, packed.order]
    if packed.act_dtype is not None:
        from delivery.kernels.quantize_per_token import OP as QUANTIZE

        q, scale = QUANTIZE(x, packed.act_dtype, packed.input_scale)
        x = q.float() * scale
    if packed.form == "float32":
        return torch.nn.functional.linear(x, packed.data[:, :k], packed.bias)
    out = x.new_empty(x.shape[0], n)
    at_once = max(1, min(n, _EXPANDED_FLOATS // padded(k)))
    buffer = torch.empty(at_once, padded(k))
    for first in range(0, n, at_once):
        count = min(at_once, n - first)
        expand(packed, first, buffer[:count])
        torch.mm(x, buffer[:count, :k].t(), out=out[:, first : first + count])
    return out if packed.bias is None else out.add_(packed.bias)


def expand(packed: PackedCpu, first: int, out: torch.Tensor) -> None:
    """Rows first … first + len(out) − 1 as float32 into out [rows, padded K]."""
    n, k = packed.shape
    values = _weight(packed)
    values |= {
        RUN: _format(packed.form)[0].expand.address,
        PIECES: op.pieces(out.shape[0], grain(n, k), op.NO_GLU),
        op.N: out.shape[0],
        op.WEIGHT: values[op.WEIGHT] + first * packed.row_bytes,
        op.OUT: out.data_ptr(),
        op.OUT_STRIDE: out.stride(0) * 4,
        op.GRAIN: grain(n, k),
    }
    if packed.scale is not None:
        values[op.SCALE] += first * packed.scale.stride(0) * packed.scale.element_size()
    if packed.zero is not None:
        values[op.ZERO] += first * packed.zero.stride(0)
    crew().run(Program([slots_of(values)], [packed, out]))


def _weight(packed: PackedCpu) -> dict[int, int]:
    grouped = packed.zero is not None
    scale, zero = packed.scale, packed.zero
    return {
        op.KIND: _format(packed.form)[1],
        op.K: packed.shape[1],
        op.N: packed.shape[0],
        op.WEIGHT: packed.data.data_ptr(),
        op.ROW_BYTES: packed.row_bytes,
        op.SCALE: _address(scale),
        op.SCALE_BYTES: scale.stride(0) * scale.element_size() if scale is not None and grouped else 0,
        op.ZERO: _address(zero),
        op.ZERO_BYTES: 0 if zero is None else zero.stride(0),
        op.GROUPS: 1 if zero is None else zero.shape[1],
        op.GROUP_CHUNKS: packed.group_size // CHUNK,
    }


def _address(tensor: Any) -> int:
    return 0 if tensor is None else int(tensor.data_ptr())
