"""A CPU linear layer as an operation of a program, and alone on tensors of any number of rows."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch

from delivery.device import usable_cores
from delivery.kernels.cpu import linear as op
from delivery.kernels.cpu import many
from delivery.kernels.cpu.pack import CHUNK, PackedCpu
from delivery.kernels.cpu.program import PIECES, PREPARE, RUN, SLOTS, Crew, Program
from delivery.kernels.cpu.quantize import NO_QUANT, QUANT_E4M3, QUANT_E5M2, QUANT_INT8

SMALL_ROWS = 32
"""Up to here rows are multiplied with weights as they are stored; beyond, with panels (`many`)."""
_FORMS = {
    "float_weights": ("float32", "bfloat16", "float16"),
    "byte_weights": ("int8", "float8_e5m2", "float8_e4m3fn"),
    "w4_weights": ("w4_half", "w4_float"),
}
"""Module → the stored forms that it computes with, in the order of their numbers there."""
_GRAIN = 32
_QUANT = {
    None: NO_QUANT,
    torch.int8: QUANT_INT8,
    torch.float8_e4m3fn: QUANT_E4M3,
    torch.float8_e5m2: QUANT_E5M2,
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
    as_is = quant == NO_QUANT and packed.zero is None and packed.order is None
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
    return -(-op.scratch_bytes(rows, k, _groups(packed), grain(n, k)) // 64) * 64


def grain(n: int, k: int) -> int:
    """Output features of one claimed piece: long enough to be worth a claim, short enough to share out."""
    return max(8, min(256, _GRAIN * 576 // max(k, 1) * 2, -(-n // (4 * crew().threads))))


def many_operations(
    packed: PackedCpu, x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor | None, scratch: torch.Tensor
) -> list[list[int]]:
    """`operation` for many rows: two operations, or one where x is read as it is.

    x has rows, and out has rows and columns, to the next whole tile (`many.ROWS`, `many.FEATURES`), whose
    content does not matter. rows: uint8, `packed_bytes`; None where that is 0. scratch: `many_scratch_bytes`.
    """
    ints = as_integers(packed)
    unit, panels = many_pieces(packed)
    values = {
        **_weight(packed),
        RUN: many.run.address,
        PIECES: -(-x.shape[0] // unit) * panels,
        op.PRODUCTS: _format(packed.form)[0].rows.address,
        op.X: x.data_ptr(),
        op.X_STRIDE: x.stride(0) * 4,
        op.M: x.shape[0],
        op.BIAS: _address(packed.bias),
        op.OUT: out.data_ptr(),
        op.OUT_STRIDE: out.stride(0) * 4,
        op.QUANT: _QUANT[packed.act_dtype],
        op.INPUT_SCALE: _address(packed.input_scale),
        op.ORDER: _address(packed.order),
        op.SCRATCH: scratch.data_ptr(),
        op.SCRATCH_BYTES: scratch.stride(0),
        op.PACKED: _address(rows),
        op.INTS: int(ints),
        op.BLOCKS: unit // many.ROWS,
    }
    products = slots_of(values)
    if rows is None:
        return [products]
    return [slots_of({**values, RUN: many.pack.address, PIECES: -(-x.shape[0] // many.ROWS)}), products]


def many_pieces(packed: PackedCpu, *, glu: bool = False) -> tuple[int, int]:
    """(rows, pieces): many rows are ⌈M / rows⌉ · pieces pieces of products."""
    n, k = packed.shape
    return many.ROWS * many.blocks_of(k, as_integers(packed)), many.pieces(n, glu)


def as_integers(packed: PackedCpu) -> bool:
    """Whether many rows of a layer are multiplied as integers."""
    if packed.zero is not None:
        return packed.group_size <= many.MOST_GROUP
    return packed.form == "int8" and packed.act_dtype == torch.int8


def packed_bytes(packed: PackedCpu, rows: int) -> int:
    """Room for many rows in the form in which they are multiplied; 0 where that is as they are."""
    ints = as_integers(packed)
    if not ints and packed.order is None and packed.act_dtype is None:
        return 0
    return many.packed_bytes(rows, packed.shape[1], _groups(packed), ints)


def many_scratch_bytes(packed: PackedCpu) -> int:
    """Scratch that one thread needs for many rows, whole cache lines."""
    return -(-many.scratch_bytes(packed.shape[1], _groups(packed), as_integers(packed)) // 64) * 64


def linear(packed: PackedCpu, x: torch.Tensor) -> torch.Tensor:
    """x float32 [M, K] → [M, N]."""
    rows, (n, k) = x.shape[0], packed.shape
    if rows == 0:
        return x.new_empty(0, n)
    tall = -(-rows // many.ROWS) * many.ROWS if rows > SMALL_ROWS else rows
    packing = packed_bytes(packed, rows) if rows > SMALL_ROWS else 0
    if padded(k) != k or x.stride(1) != 1 or (tall != rows and packing == 0):
        wide = x.new_zeros(tall, padded(k))
        wide[:rows, :k] = x
        x = wide[:rows]
    if rows > SMALL_ROWS:
        out = x.new_empty(tall, -(-n // many.FEATURES) * many.FEATURES)
        room = torch.empty(packing, dtype=torch.uint8) if packing else None
        scratch = torch.empty(crew().threads, many_scratch_bytes(packed), dtype=torch.uint8)
        crew().run(Program(many_operations(packed, x, out, room, scratch), [packed, x, out, room, scratch]))
        return out[:rows, :n]
    out = x.new_empty(rows, n)
    scratch = torch.empty(crew().threads, scratch_bytes(packed, rows), dtype=torch.uint8)
    crew().run(Program([operation(packed, x, out, scratch)], [packed, x, out, scratch]))
    return out


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
        op.GROUPS: _groups(packed),
        op.GROUP_CHUNKS: packed.group_size // CHUNK,
    }


def _groups(packed: PackedCpu) -> int:
    return 1 if packed.zero is None else packed.zero.shape[1]


def _address(tensor: Any) -> int:
    return 0 if tensor is None else int(tensor.data_ptr())
