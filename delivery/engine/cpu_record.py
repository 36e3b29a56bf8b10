"""Recording a decode step for the CPU: the block's own calls become one program of operations.

A `Buffer` stands in for a tensor while `stream` runs once; the CPU's forms, given one, write an
operation down instead of computing. What comes out is replayed with new inputs at the same addresses, as
a CUDA graph would be, without Python between the operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from delivery.kernels.cpu import attention as cpu_attention
from delivery.kernels.cpu import layer as cpu_layer
from delivery.kernels.cpu import linear as cpu_linear
from delivery.kernels.cpu import prompt as cpu_prompt
from delivery.kernels.cpu import rows as cpu_rows
from delivery.kernels.cpu.many import run as many_run
from delivery.kernels.cpu.pack import PackedCpu
from delivery.kernels.cpu.program import PIECES, RUN, Program, bits_of
from delivery.kernels.cpu.tiles import ROWS

_TABLES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Buffer:
    """`size` columns from `first` of float32 rows that an operation fills; the rows are padded with zeros."""

    recorder: Recorder
    rows: torch.Tensor
    first: int
    size: int

    @property
    def address(self) -> int:
        return int(self.rows.data_ptr()) + 4 * self.first

    @property
    def stride(self) -> int:
        """Bytes from row to row."""
        return self.rows.stride(0) * 4

    def split(self, sizes: tuple[int, ...], dim: int = -1) -> list[Buffer]:
        parts, at = [], self.first
        for size in sizes:
            parts.append(Buffer(self.recorder, self.rows, at, size))
            at += size
        return parts

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> Buffer:
        """Heads lie behind each other in a row as it is."""
        return self

    def whole(self) -> torch.Tensor:
        """The rows as a tensor that starts at this buffer's first column."""
        return self.rows[:, self.first :]


@dataclass(frozen=True, slots=True)
class Varying:
    """A slot that follows from a step's number of rows: ⌈rows / unit⌉ · factor."""

    operation: int
    slot: int
    unit: int = 1
    factor: int = 1


class Recorder:
    """Collects the operations of a step of `rows` rows, or of up to so many: `varying` says what changes."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.many = rows > cpu_layer.SMALL_ROWS
        self.varying: list[Varying] = []
        self.attending: list[int] = []
        self._between = torch.empty(0, dtype=torch.uint8)
        self._operations: list[list[int]] = []
        self._keep: list[Any] = []
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}
        self._ordinal = 0
        self._scratch = 64
        self._scratched: list[tuple[int, int, int]] = []

    def next_layer(self) -> None:
        """Buffers of the layer before may be used again: all that lives on is the residual and delta."""
        self._ordinal = 0

    def buffer(self, size: int, *, own: bool = False) -> Buffer:
        """Rows of `size` columns; own: never shared with another layer."""
        tall = -(-self.rows // ROWS) * ROWS
        if own:
            tensor = torch.zeros(tall, cpu_layer.padded(size))
            self._keep.append(tensor)
            return Buffer(self, tensor, 0, size)
        self._ordinal += 1
        key = (self._ordinal, size)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(tall, cpu_layer.padded(size))
        return Buffer(self, self._buffers[key], 0, size)

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor, size: int, scale: float) -> Buffer:
        out = self.buffer(size, own=True)
        kind = _TABLES.index(table.dtype)
        slots = {
            RUN: cpu_rows.embed.address,
            PIECES: self.rows,
            cpu_rows.E_IDS: token_ids.data_ptr(),
            cpu_rows.E_TABLE: table.data_ptr(),
            cpu_rows.E_ROW_BYTES: table.stride(0) * table.element_size(),
            cpu_rows.E_KIND: kind,
            cpu_rows.E_SIZE: size,
            cpu_rows.E_SCALE: bits_of(scale),
            cpu_rows.E_OUT: out.address,
            cpu_rows.E_OUT_STRIDE: out.stride,
        }
        self.varying.append(Varying(len(self._operations), PIECES))
        self._add(slots, [token_ids, table])
        return out

    def norm(self, x: Buffer, weight: torch.Tensor, eps: float, residual: Buffer | None = None) -> Buffer:
        """norm(x), or norm(x + residual) with residual += x. weight float32, padded to whole chunks."""
        out = self.buffer(x.size)
        slots = {
            RUN: cpu_rows.norm.address,
            PIECES: self.rows,
            cpu_rows.N_X: x.address,
            cpu_rows.N_X_STRIDE: x.stride,
            cpu_rows.N_RESIDUAL: 0 if residual is None else residual.address,
            cpu_rows.N_RESIDUAL_STRIDE: 0 if residual is None else residual.stride,
            cpu_rows.N_WEIGHT: weight.data_ptr(),
            cpu_rows.N_EPS: bits_of(eps),
            cpu_rows.N_SIZE: x.size,
            cpu_rows.N_OUT: out.address,
            cpu_rows.N_OUT_STRIDE: out.stride,
        }
        self.varying.append(Varying(len(self._operations), PIECES))
        self._add(slots, [weight])
        return out

    def linear(self, packed: PackedCpu, x: Buffer, *, own: bool = False) -> Buffer:
        out = self.buffer(packed.shape[0], own=own)
        scratch = torch.empty(1, 1, dtype=torch.uint8)
        read = x.whole()[: self.rows]
        if self.many:
            size = cpu_layer.packed_bytes(packed, self.rows)
            rows = self._room(size) if size else None
            made = cpu_layer.many_operations(packed, read, out.rows, rows, scratch)
            self._scratch_for(cpu_layer.many_scratch_bytes(packed))
        else:
            made = [cpu_layer.operation(packed, read, out.rows, scratch)]
            self._scratch_for(cpu_layer.scratch_bytes(packed, self.rows))
        for slots in made:
            index = len(self._operations)
            self._scratched.append((index, cpu_linear.SCRATCH, cpu_linear.SCRATCH_BYTES))
            self.varying.append(Varying(index, cpu_linear.M))
            self._operations.append(slots)
        if self.many:
            if len(made) > 1:
                self.varying.append(Varying(index - 1, PIECES, ROWS))
            self.varying.append(Varying(index, PIECES, *cpu_layer.many_pieces(packed)))
        self._keep.append(packed)
        self._product = packed
        return out

    def _room(self, size: int) -> torch.Tensor:
        """Bytes that are needed until the next operation only."""
        if self._between.numel() < size:
            self._between = torch.empty(size, dtype=torch.uint8)
            self._keep.append(self._between)
        return self._between

    def gated(self, both: Buffer, activation: str) -> Buffer:
        """act(gate) · up; the product that made `both` does it at once where it was the last operation."""
        last = self._operations[-1]
        mode = {"silu": cpu_linear.SILU, "gelu_tanh": cpu_linear.GELU_TANH, "gelu": cpu_linear.GELU}[
            activation
        ]
        out = self.buffer(both.size // 2)
        if last[cpu_linear.OUT] == both.address and last[RUN] in (cpu_linear.run.address, many_run.address):
            last[cpu_linear.GLU] = mode
            last[cpu_linear.OUT], last[cpu_linear.OUT_STRIDE] = out.address, out.stride
            if self.many:
                unit, pieces = cpu_layer.many_pieces(self._product, glu=True)
                last[PIECES] = -(-self.rows // unit) * pieces
                self.varying[-1] = Varying(len(self._operations) - 1, PIECES, unit, pieces)
            else:
                last[PIECES] = cpu_linear.pieces(both.size, last[cpu_linear.GRAIN], mode)
            return out
        slots = {
            RUN: cpu_linear.activate.address,
            PIECES: self.rows,
            cpu_linear.X: both.address,
            cpu_linear.X_STRIDE: both.stride,
            cpu_linear.N: both.size,
            cpu_linear.OUT: out.address,
            cpu_linear.OUT_STRIDE: out.stride,
            cpu_linear.GLU: mode,
        }
        self.varying.append(Varying(len(self._operations), PIECES))
        self._add(slots, [])
        return out

    def attention(self, slots: dict[int, int], keep: list[Any], context: int, out: Buffer) -> None:
        """Rotary, cache write and attention of one query per row; context: the longest."""
        slots |= {RUN: cpu_attention.run.address, PIECES: self.rows * slots[cpu_attention.KV_HEADS]}
        self._attention(slots, keep, cpu_attention.scratch_bytes(context, slots[cpu_attention.GROUP]), out)

    def prompt_attention(self, slots: dict[int, int], keep: list[Any], out: Buffer) -> None:
        """The same of any mixture; the number of blocks of queries is set before a step (`cpu_prompt`)."""
        stored = {**slots, RUN: cpu_prompt.store.address, cpu_prompt.COUNT: self.rows}
        self.varying.append(Varying(len(self._operations), cpu_prompt.COUNT))
        self.varying.append(Varying(len(self._operations), PIECES, cpu_prompt.STORED))
        self._add(stored, keep)
        slots |= {RUN: cpu_prompt.attend.address}
        self.attending.append(len(self._operations))
        size = cpu_prompt.scratch_bytes(slots[cpu_attention.GROUP], slots[cpu_attention.HEAD_DIM])
        self._attention(slots, keep, size, out)

    def _attention(self, slots: dict[int, int], keep: list[Any], scratch: int, out: Buffer) -> None:
        slots |= {cpu_attention.OUT: out.address, cpu_attention.OUT_STRIDE: out.stride}
        self._scratch_for(scratch)
        self._scratched.append((len(self._operations), cpu_attention.SCRATCH, cpu_attention.SCRATCH_BYTES))
        self._add(slots, keep)

    def finish(self) -> Program:
        """The program; all of its operations share one scratch per thread."""
        scratch = torch.empty(cpu_layer.crew().threads, self._scratch, dtype=torch.uint8)
        for index, address, size in self._scratched:
            self._operations[index][address] = scratch.data_ptr()
            self._operations[index][size] = self._scratch
        return Program(self._operations, [*self._keep, *self._buffers.values(), scratch])

    def _scratch_for(self, size: int) -> None:
        self._scratch = max(self._scratch, -(-size // 64) * 64)

    def _add(self, slots: dict[int, int], keep: list[Any]) -> None:
        self._operations.append(cpu_layer.slots_of(slots))
        self._keep += keep
