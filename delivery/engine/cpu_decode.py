"""Recorded decode steps on a CPU: one program per batch size, made when it is first needed."""

from __future__ import annotations

from typing import Any

import torch

from delivery.engine.cpu_mix import RecordedAttention
from delivery.engine.cpu_record import Recorder
from delivery.engine.engine_model import EngineModel
from delivery.engine.forms_cpu import CpuLinear, CpuNorm
from delivery.engine.inputs import Batch, InputStage, resolved_ids
from delivery.engine.kv_cache import KVCache, RotaryTables
from delivery.engine.paged import StepInputs
from delivery.kernels.cpu.ir import LANES
from delivery.kernels.cpu.layer import crew
from delivery.kernels.cpu.program import Program
from delivery.model.decoder import scale_and_cap, stream

SIZES = (1, 2, 4, 8, 16, 32, 64)


class CpuDecode:
    """Replays decode steps of up to 64 requests. Make one only where `why_not` is None."""

    def __init__(self, model: EngineModel, cache: KVCache, rotary: RotaryTables, stage: InputStage) -> None:
        self._model = model
        self._cache = cache
        self._rotary = rotary
        self._stage = stage
        self._token_ids = torch.zeros(SIZES[-1], dtype=torch.int32)
        self._programs: dict[int, tuple[Program, torch.Tensor]] = {}

    def padded(self, decodes: int) -> int | None:
        return next((size for size in SIZES if decodes <= size <= self._stage.sequences), None)

    def run(self, batch: Batch, last_token: torch.Tensor) -> torch.Tensor:
        """Logits [rows, V]; they are overwritten by the next step of the same size."""
        rows = batch.token_slots.shape[0]
        self._token_ids[:rows] = resolved_ids(batch, last_token)
        program, logits = self.program(rows, batch.inputs)
        crew().run(program)
        return scale_and_cap(self._model.config, logits)

    def program(self, rows: int, inputs: StepInputs) -> tuple[Program, torch.Tensor]:
        """The recorded step of a size and where its logits appear."""
        if rows not in self._programs:
            self._programs[rows] = self._record(rows, inputs)
        return self._programs[rows]

    def _record(self, rows: int, inputs: StepInputs) -> tuple[Program, torch.Tensor]:
        model, config = self._model, self._model.config
        recorder = Recorder(rows)
        # It has no gated delta rule: `why_not` keeps models away that ask for it.
        mix: Any = RecordedAttention(self._cache, self._rotary, inputs)
        table = model.embedding.table
        residual: Any = recorder.embed(self._token_ids, table, config.hidden_size, config.embedding_scale)
        delta: Any = None
        for layer, weights in enumerate(model.blocks):
            recorder.next_layer()
            residual, delta = stream(
                config,
                layer,
                weights,
                residual,
                delta,
                inputs.positions,
                mix,
            )
        x, _ = model.head.norm.add(delta, residual)
        logits = recorder.linear(model.head.head.packed, x, own=True)
        return recorder.finish(), logits.rows[:rows, : config.vocab_size]


def why_not(model: EngineModel, cache: KVCache) -> str | None:
    """Why a model's decode steps cannot be recorded."""
    config = model.config
    if config.moe is not None or config.delta is not None or config.attention_gate:
        return "experts and gated delta layers are not recorded"
    if config.head_dim % LANES:
        return f"head_dim {config.head_dim} is not a multiple of {LANES}"
    if any(c is None or c.k.dtype != torch.float32 for c in cache.layers):
        return "the KV cache is quantised"
    runs = [r for b in model.blocks for r in (*b.linears.values(), *(p.run for p in b.products.values()))]
    if not all(isinstance(run, CpuLinear) for run in (*runs, model.head.head)):
        return "a layer has no packed form"
    if any(len(b.products) != 2 for b in model.blocks):
        return "q, k and v, or gate and up, are of different kinds"
    if not isinstance(model.head.norm, CpuNorm) or model.embedding.table.dtype not in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ):
        return "the embedding is quantised"
    return None
