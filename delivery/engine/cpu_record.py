"""Recording a decode step for the CPU: the block's own calls become one program of operations.

A `Buffer` stands in for a tensor while `stream` runs once; the CPU's forms, given one, write an
operation down instead of computing. What comes out is replayed with new inputs at the same addresses, as
a CUDA graph would be, without Python between the operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from delivery.engine.kv_cache import KVCache, RotaryTables
from delivery.engine.paged import StepInputs
from delivery.kernels.cpu import attention as cpu_attention
from delivery.kernels.cpu import layer as cpu_layer
from delivery.kernels.cpu import linear as cpu_linear
from delivery.kernels.cpu import rows as cpu_rows
from delivery.kernels.cpu.pack import PackedCpu
from delivery.kernels.cpu.program import PIECES, RUN, Program, bits_of
from delivery.model.attention import scale_of, window_of
from delivery.model.config import ModelConfig

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


class Recorder:
    """Collects the operations of a step of `rows` rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
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
        if own:
            tensor = torch.zeros(self.rows, cpu_layer.padded(size))
            self._keep.append(tensor)
            return Buffer(self, tensor, 0, size)
        self._ordinal += 1
        key = (self._ordinal, size)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(self.rows, cpu_layer.padded(size))
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
        self._add(slots, [weight])
        return out

    def linear(self, packed: PackedCpu, x: Buffer, *, own: bool = False) -> Buffer:
        out = self.buffer(packed.shape[0], own=own)
        scratch = torch.empty(1, 1, dtype=torch.uint8)
        slots = cpu_layer.operation(packed, x.whole(), out.rows, scratch)
        self._scratch_for(cpu_layer.scratch_bytes(packed, self.rows))
        self._scratched.append((len(self._operations), cpu_linear.SCRATCH, cpu_linear.SCRATCH_BYTES))
        self._operations.append(slots)
        self._keep.append(packed)
        return out

    def gated(self, both: Buffer, activation: str) -> Buffer:
        """act(gate) · up; the product that made `both` does it at once where it was the last operation."""
        last = self._operations[-1]
        mode = {"silu": cpu_linear.SILU, "gelu_tanh": cpu_linear.GELU_TANH, "gelu": cpu_linear.GELU}[
            activation
        ]
        out = self.buffer(both.size // 2)
        if last[RUN] == cpu_linear.run.address and last[cpu_linear.OUT] == both.address:
            last[cpu_linear.GLU] = mode
            last[PIECES] = cpu_linear.pieces(both.size, last[cpu_linear.GRAIN], mode)
            last[cpu_linear.OUT], last[cpu_linear.OUT_STRIDE] = out.address, out.stride
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
        self._add(slots, [])
        return out

    def attention(
        self, slots: dict[int, int], keep: list[Any], context: int, group: int, size: int
    ) -> Buffer:
        out = self.buffer(size)
        slots |= {
            RUN: cpu_attention.run.address,
            cpu_attention.OUT: out.address,
            cpu_attention.OUT_STRIDE: out.stride,
        }
        self._scratch_for(cpu_attention.scratch_bytes(context, group))
        self._scratched.append((len(self._operations), cpu_attention.SCRATCH, cpu_attention.SCRATCH_BYTES))
        self._add(slots, keep)
        return out

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


class RecordedAttention:
    """The mixer of a recorded step: one operation per layer over the paged cache, at fixed addresses."""

    def __init__(self, cache: KVCache, rotary: RotaryTables, inputs: StepInputs) -> None:
        self._cache = cache
        self._rotary = rotary
        self._inputs = inputs

    def attention(
        self,
        config: ModelConfig,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        positions: torch.Tensor,
        norms: Mapping[str, Any],
    ) -> Any:
        cache, inputs = self._cache.layers[layer], self._inputs
        assert cache is not None
        cos, sin = self._rotary.tables[self._rotary.which(layer)]
        softcap = config.attention_softcap or 0.0
        floats = torch.tensor([scale_of(config), softcap, config.rms_eps])
        keep: list[Any] = [cache.k, cache.v, cos, sin, floats, inputs]
        slots = {
            cpu_attention.Q: q.address,
            cpu_attention.K: k.address,
            cpu_attention.V: v.address,
            cpu_attention.Q_STRIDE: q.stride,
            cpu_attention.KV_STRIDE: k.stride,
            PIECES: q.recorder.rows * config.num_kv_heads,
            cpu_attention.KV_HEADS: config.num_kv_heads,
            cpu_attention.GROUP: config.num_heads // config.num_kv_heads,
            cpu_attention.HEAD_DIM: config.head_dim,
            cpu_attention.HALF: cos.shape[1],
            cpu_attention.COS: cos.data_ptr(),
            cpu_attention.SIN: sin.data_ptr(),
            cpu_attention.ROPE_ROWS: inputs.rope_rows.data_ptr(),
            cpu_attention.K_CACHE: cache.k.data_ptr(),
            cpu_attention.V_CACHE: cache.v.data_ptr(),
            cpu_attention.BLOCK_SIZE: self._cache.block_size,
            cpu_attention.BLOCK_TABLE: inputs.block_table.data_ptr(),
            cpu_attention.TABLE_STRIDE: inputs.block_table.stride(0) * 4,
            cpu_attention.CONTEXT: inputs.context_lens.data_ptr(),
            cpu_attention.SLOTS: inputs.slot_mapping.data_ptr(),
            cpu_attention.FLOATS: floats.data_ptr(),
            cpu_attention.WINDOW: window_of(config, layer) or 0,
        }
        if config.qk_norm:
            for slot, name in ((cpu_attention.Q_NORM, "q_norm"), (cpu_attention.K_NORM, "k_norm")):
                slots[slot] = norms[name].effective.data_ptr()
                keep.append(norms[name].effective)
        group = config.num_heads // config.num_kv_heads
        size = config.num_heads * config.head_dim
        return q.recorder.attention(slots, keep, self._rotary.length, group, size)
