"""Recorded steps with prompts on a CPU: two programs, for few rows and for many, that fit any step.

What a number of rows changes in a program is known (`Varying`) and set before it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from delivery.engine.cpu_mix import RecordedAttention
from delivery.engine.cpu_record import Recorder
from delivery.engine.inputs import Batch, resolved_ids
from delivery.engine.kv_cache import KVCache
from delivery.engine.paged import StepInputs
from delivery.kernels.cpu import prompt
from delivery.kernels.cpu.layer import SMALL_ROWS, crew
from delivery.kernels.cpu.program import PIECES, Program
from delivery.model.decoder import stream

if TYPE_CHECKING:
    from delivery.engine.runner import ModelRunner

_FIRST_SIZE = 128
"""Rows of the first program for many; a step that has more gets a new one, of the next power of two."""


class _Step:
    """The program of steps of up to `rows` rows; their hidden states are the sum of the two results."""

    def __init__(self, runner: ModelRunner, inputs: StepInputs, rows: int) -> None:
        model, config = runner.model, runner.model.config
        recorder = Recorder(rows)
        self.rows = rows
        self.token_ids = torch.zeros(rows, dtype=torch.int32)
        self.work = torch.zeros(rows, 4, dtype=torch.int64)
        mix: Any = RecordedAttention(runner.cache, runner.rotary, inputs, self.work)
        table = model.embedding.table
        residual: Any = recorder.embed(self.token_ids, table, config.hidden_size, config.embedding_scale)
        delta: Any = None
        for layer, weights in enumerate(model.blocks):
            recorder.next_layer()
            residual, delta = stream(config, layer, weights, residual, delta, inputs.positions, mix)
        hidden = config.hidden_size
        self._results: tuple[torch.Tensor, torch.Tensor] = (
            residual.whole()[:, :hidden],
            delta.whole()[:, :hidden],
        )
        self.program: Program = recorder.finish()
        self._kv_heads = config.num_kv_heads
        self._group = config.num_heads // config.num_kv_heads
        self._attending = recorder.attending
        fields = [(v.operation, v.slot, v.unit, v.factor) for v in recorder.varying]
        self._varying = np.array(fields, np.int64).T

    def run(self, inputs: StepInputs, token_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states [S, H] of the rows that sample."""
        rows = token_ids.shape[0]
        self.token_ids[:rows] = token_ids
        blocks = query_blocks(inputs, prompt.queries(self._group))
        self.work[: len(blocks)] = torch.tensor(blocks, dtype=torch.int64).view(-1, 4)
        operation, slot, unit, factor = self._varying
        self.program.set(operation, slot, -(-rows // unit) * factor)
        self.program.set(self._attending, PIECES, len(blocks) * self._kv_heads)
        crew().run(self.program)
        residual, delta = self._results
        return residual[inputs.sample_rows] + delta[inputs.sample_rows]


def query_blocks(inputs: StepInputs, most: int) -> list[tuple[int, int, int, int]]:
    """(first row, rows, position of the first row, sequence) of blocks of up to `most` queries of one
    sequence each; those that see most come first."""
    starts, lengths = inputs.query_start.tolist(), inputs.context_lens.tolist()
    blocks = []
    for sequence, length in enumerate(lengths):
        end = starts[sequence + 1]
        for first in range(starts[sequence], end, most):
            blocks.append((first, min(most, end - first), length - (end - first), sequence))
    return sorted(blocks, key=lambda block: -block[2])


class CpuPrompts:
    """Runs steps of any mixture. Make one only where `cpu_decode.why_not` and `why_not` are None."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._few: _Step | None = None
        self._many: _Step | None = None

    def shape(self, tokens: int, sequences: int) -> tuple[int, int] | None:
        """Any step, as it is."""
        return tokens, sequences

    def run_mixed(self, batch: Batch) -> torch.Tensor:
        """Logits [S, V] of the rows that sample."""
        token_ids = resolved_ids(batch, self._runner.last_token)
        step = self._step(batch.inputs, token_ids.shape[0])
        return self._runner.model.final(step.run(batch.inputs, token_ids))

    def _step(self, inputs: StepInputs, rows: int) -> _Step:
        if rows <= SMALL_ROWS:
            if self._few is None:
                self._few = _Step(self._runner, inputs, SMALL_ROWS)
            return self._few
        if self._many is None or self._many.rows < rows:
            self._many = None  # its buffers make room first
            self._many = _Step(self._runner, inputs, max(_FIRST_SIZE, 1 << (rows - 1).bit_length()))
        return self._many


def why_not(cache: KVCache) -> str | None:
    """Why steps with prompts cannot be recorded, where steps of decodes can."""
    if cache.block_size % 8:
        return f"KV blocks of {cache.block_size} tokens are not a multiple of 8"
    return None
