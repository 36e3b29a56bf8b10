"""ModelRunner: one step's work on one device.

It owns the per-slot state on the device (last token, sampling parameters, block tables) and runs the
same program for any mix of prompt pieces and decodes; steps of a recorded size are replayed instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from delivery.engine.engine_model import EngineModel
from delivery.engine.inputs import SPARE_SLOTS, Batch, InputStage, resolved_ids
from delivery.engine.kv_cache import KVCache, RotaryTables
from delivery.engine.outputs import Admitted, ModelOutput, Scheduled, SchedulerOutput
from delivery.engine.paged import PagedAttention, StepInputs
from delivery.engine.request import SamplingParams
from delivery.engine.sampler import Row, Sampled, Sampler
from delivery.model.decoder import stream


@dataclass(slots=True)
class _Slot:
    """What the host keeps of a running request. history: its tokens, kept for penalties only."""

    new: Admitted
    history: list[int]


class Recorded(Protocol):
    """Recorded steps of decodes alone: CUDA graphs on a GPU, compiled op lists on a CPU."""

    def padded(self, decodes: int) -> int | None:
        """The recorded batch size that holds so many decodes; None when none does."""
        ...

    def run(self, batch: Batch, last_token: torch.Tensor) -> torch.Tensor:
        """Logits [rows, V] of a batch of a recorded size; last_token int32 [slots]."""
        ...


class RecordedMixed(Protocol):
    """Recorded steps of any mixture of prompts and decodes."""

    def shape(self, tokens: int, sequences: int) -> tuple[int, int] | None:
        """The recorded (tokens, sequences) that hold a step of any mixture; None when none do."""
        ...

    def run_mixed(self, batch: Batch) -> torch.Tensor:
        """Logits [S, V] of the sampling rows of a batch of a recorded shape."""
        ...


class PendingOutput:
    """A step's result on its way from the device; `result` waits for it."""

    def __init__(self, work: SchedulerOutput, batch: Batch, rows: list[Row], sampled: Sampled) -> None:
        self._work = work
        self._batch = batch
        self._rows = rows
        self._sampled = sampled
        self._event: torch.cuda.Event | None = None
        self._token_ids = sampled.token_ids
        if sampled.token_ids.is_cuda:
            self._token_ids = torch.empty_like(sampled.token_ids, device="cpu", pin_memory=True)
            self._token_ids.copy_(sampled.token_ids, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        self._result: ModelOutput | None = None

    def result(self) -> ModelOutput:
        if self._result is None:
            if self._event is not None:
                self._event.synchronize()
            tokens = self._token_ids[: len(self._rows)].tolist()
            logprobs = self._sampled.logprobs(tokens, self._rows)
            # Back from batch order (decodes first) to the scheduler's.
            places = [self._batch.order[i] for i in self._batch.sampling]
            ranked = sorted(range(len(places)), key=places.__getitem__)
            self._result = ModelOutput(
                self._work.step,
                tuple(tokens[i] for i in ranked),
                tuple(logprobs[i] for i in ranked) if logprobs else (),
            )
        return self._result


class ModelRunner:
    """Runs steps in the order in which they are given."""

    def __init__(
        self,
        model: EngineModel,
        cache: KVCache,
        rotary: RotaryTables,
        *,
        tokens: int,
        sequences: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.model = model
        self.cache = cache
        self.rotary = rotary
        self.device = device
        self.stage = InputStage(
            tokens=tokens,
            sequences=sequences,
            length=rotary.length,
            block_size=cache.block_size,
            device=device,
            switch=rotary.switch,
        )
        self.sampler = Sampler(sequences, device, seed)
        self.recorded: Recorded | None = None
        self.mixed: RecordedMixed | None = None
        self.last_token = torch.zeros(sequences + SPARE_SLOTS, dtype=torch.int32, device=device)
        self._slots: dict[int, _Slot] = {}

    @torch.inference_mode()
    def execute(self, work: SchedulerOutput) -> PendingOutput:
        """Run a step. On a GPU this returns before the device is done."""
        for new in work.admitted:
            history = list(new.token_ids) if new.sampling.needs_history else []
            self._slots[new.slot] = _Slot(new, history)
            self.sampler.admit(new)
        padded, shape = self._recorded_size(work)
        batch = self.stage.build(work, padded, shape)
        if self.recorded is not None and padded is not None:
            logits = self.recorded.run(batch, self.last_token)
        elif self.mixed is not None and shape is not None:
            logits = self.mixed.run_mixed(batch)
        else:
            logits = self.logits(resolved_ids(batch, self.last_token), batch.inputs)
        rows = [self._row(work.scheduled[batch.order[i]]) for i in batch.sampling]
        sampled = self.sampler.sample(logits, rows, batch.slots, batch.num_output)
        self.last_token[batch.slots] = sampled.token_ids.to(torch.int32)
        pending = PendingOutput(work, batch, rows, sampled)
        if work.needs_history:
            self._remember(batch, work, sampled.token_ids.tolist())
        return pending

    def logits(self, token_ids: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """The model on a flat batch: logits [S, V] of the rows that sample."""
        return self.model.final(self.hidden(token_ids, inputs)[inputs.sample_rows])

    def hidden(
        self, token_ids: torch.Tensor, inputs: StepInputs, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The last block's output [T, H], before the final norm; written to `out` where it is given."""
        mix = PagedAttention(self.cache, self.rotary, inputs)
        residual, delta = self.model.embed(token_ids), None
        for layer, weights in enumerate(self.model.blocks):
            residual, delta = stream(
                self.model.config, layer, weights, residual, delta, inputs.positions, mix
            )
        if delta is None:
            return residual if out is None else out.copy_(residual)
        return torch.add(residual, delta, out=out)

    @torch.inference_mode()
    def prompt_logits(
        self, token_ids: Sequence[int], block_ids: Sequence[int], piece: int
    ) -> Iterator[torch.Tensor]:
        """Logits [n, V] of every token of one sequence, `piece` tokens at a time, in the given blocks.

        Steps of running requests may come between the pieces.
        """
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        slot = self.stage.spare_slot
        new = Admitted(slot, "", tuple(token_ids), 0, tuple(block_ids), sampling)
        for start in range(0, len(token_ids), piece):
            count = min(piece, len(token_ids) - start)
            item = Scheduled(slot, start, count, (), False, 0)
            batch = self.stage.build(SchedulerOutput(0, (new,) if start == 0 else (), (item,), count))
            yield self.model.final(self.hidden(batch.inputs.token_ids, batch.inputs))

    def _recorded_size(self, work: SchedulerOutput) -> tuple[int | None, tuple[int, int] | None]:
        """The recorded size of a step of decodes alone, or the recorded shape of any other step."""
        sequences = len(work.scheduled)
        decodes = work.num_tokens == sequences and all(item.samples for item in work.scheduled)
        if decodes and self.recorded is not None and (size := self.recorded.padded(sequences)) is not None:
            return size, None
        return None, None if self.mixed is None else self.mixed.shape(work.num_tokens, sequences)

    def _row(self, item: Scheduled) -> Row:
        slot = self._slots[item.slot]
        new = slot.new
        return Row(item.slot, new.sampling, new.eos_token_ids, item.num_output, slot.history)

    def _remember(self, batch: Batch, work: SchedulerOutput, tokens: list[int]) -> None:
        for index, token in zip(batch.sampling, tokens, strict=False):
            slot = self._slots[work.scheduled[batch.order[index]].slot]
            if slot.new.sampling.needs_history:
                slot.history.append(token)
