"""From SchedulerOutput to a step's inputs: persistent per-slot state, staged once, copied once.

Host arrays are written in place and copied into a fixed device buffer, so a recorded step finds its inputs
at the same addresses every time. Decode steps have a small buffer of their own, which travels faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from delivery.engine.outputs import Scheduled, SchedulerOutput
from delivery.engine.paged import StepInputs
from delivery.engine.staging import Staging

ON_DEVICE = -1
"""Stands for a token id that only the device knows: the last one sampled for its slot."""
SPARE_SLOTS = 2
"""Slots of state beyond those of running requests."""
ON_THE_DEVICE_ALONE = -1
"""num_decodes of a recorded step of any mixture: the kernels read which sequences have one query."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's inputs, and on the host what belongs to its rows.

    order: indices into SchedulerOutput.scheduled, in batch order (decodes first). sampling: indices into
    `order` of the entries that sample, in batch order. slots int64 [S], of the entries that sample;
    token_slots int64 [T].
    """

    inputs: StepInputs
    order: list[int]
    sampling: list[int]
    slots: torch.Tensor
    token_slots: torch.Tensor
    num_output: torch.Tensor


def resolved_ids(batch: Batch, last_token: torch.Tensor) -> torch.Tensor:
    """int32 [T]: token ids as the host knows them, or the last one sampled for the token's slot."""
    ids = batch.inputs.token_ids
    return torch.where(ids < 0, last_token[batch.token_slots], ids)


class InputStage:
    """Builds the inputs of every step.

    tokens, sequences, length: the most of a step, of a batch, of a sequence.
    """

    def __init__(
        self,
        *,
        tokens: int,
        sequences: int,
        length: int,
        block_size: int,
        device: torch.device,
        switch: int | None,
    ) -> None:
        self.block_size = block_size
        self.sequences = sequences
        self.device = device
        self.max_blocks = -(-length // block_size)
        self._length = length
        self._switch = switch
        # Two slots more than requests can run: prompts that are scored go to one, and padding has one.
        self.spare_slot, self.padding_slot = sequences, sequences + 1
        slots = sequences + SPARE_SLOTS
        self._known: list[np.ndarray] = [np.empty(0, np.int32)] * slots
        self._long = np.zeros(slots, np.int64)
        self._table = np.zeros((slots, self.max_blocks), np.int32)
        self._blocks = np.zeros(slots, np.int64)
        self._mixed = self._staging(tokens, sequences, device)
        self._decodes = self._staging(sequences, sequences, device)
        self._now = self._mixed

    def _staging(self, tokens: int, sequences: int, device: torch.device) -> Staging:
        wide = {"positions": tokens, "rope_rows": tokens, "slot_mapping": tokens, "token_slots": tokens}
        wide |= {"sample_rows": sequences, "slots": sequences, "num_output": sequences}
        narrow = {"token_ids": tokens, "query_start": sequences + 1, "context_lens": sequences}
        narrow |= {"block_table": sequences * self.max_blocks}  # the last: of it, only what is used is sent
        sizes = {name: (np.int64, size) for name, size in wide.items()}
        return Staging({**sizes, **{name: (np.int32, size) for name, size in narrow.items()}}, device)

    def build(
        self, work: SchedulerOutput, pad_decodes: int | None = None, shape: tuple[int, int] | None = None
    ) -> Batch:
        """The batch of a step. pad_decodes: a batch of decodes alone is filled up to so many rows, with
        sequences of length 0 that store nothing. shape: any step is filled up to so many tokens and
        sequences; the extra tokens are padding and the extra sequences have no rows."""
        self._take_over(work)
        items = work.scheduled
        order = [i for i, item in enumerate(items) if item.num_tokens == 1]
        num_decodes = len(order)
        order += [i for i, item in enumerate(items) if item.num_tokens != 1]
        ordered = [items[i] for i in order]
        sampling = [i for i, item in enumerate(ordered) if item.samples]
        tokens, rows, samples = work.num_tokens, len(ordered), len(sampling)
        if pad_decodes is not None:
            num_decodes = tokens = rows = samples = pad_decodes
        elif shape is not None:
            (tokens, rows), num_decodes = shape, ON_THE_DEVICE_ALONE
        self._now = self._mixed if pad_decodes is None else self._decodes
        self._now.next()
        self._fill(ordered, work.num_tokens)
        self._pad(work.num_tokens, len(ordered), tokens, rows, 0 if pad_decodes is None else 1)
        self._fill_sampling(ordered, sampling, samples)
        self._now.send(rows * self.max_blocks)
        return Batch(
            inputs=self._inputs(tokens, rows, samples, num_decodes),
            order=order,
            sampling=sampling,
            slots=self._now.device("slots", samples),
            token_slots=self._now.device("token_slots", tokens),
            num_output=self._now.device("num_output", samples),
        )

    def blank(self, tokens: int, rows: int, *, decodes: bool) -> Batch:
        """A step that is all padding: what a recording of that size is made with."""
        self._now = self._decodes if decodes else self._mixed
        self._now.next()
        self._now.host("query_start")[0] = 0
        self._pad(0, 0, tokens, rows, 1 if decodes else 0)
        self._fill_sampling([], [], rows)
        self._now.send(rows * self.max_blocks)
        return Batch(
            inputs=self._inputs(tokens, rows, rows, rows if decodes else ON_THE_DEVICE_ALONE),
            order=[],
            sampling=[],
            slots=self._now.device("slots", rows),
            token_slots=self._now.device("token_slots", tokens),
            num_output=self._now.device("num_output", rows),
        )

    def _take_over(self, work: SchedulerOutput) -> None:
        """Keep what requests bring along, and the blocks that they have been given."""
        for new in work.admitted:
            self._known[new.slot] = np.asarray(new.token_ids, np.int32)
            self._long[new.slot] = self._switch is not None and len(new.token_ids) > self._switch
            self._table[new.slot, : len(new.block_ids)] = new.block_ids
            self._blocks[new.slot] = len(new.block_ids)
        for item in work.scheduled:
            if item.new_block_ids:
                first = self._blocks[item.slot]
                self._table[item.slot, first : first + len(item.new_block_ids)] = item.new_block_ids
                self._blocks[item.slot] += len(item.new_block_ids)

    def _inputs(self, tokens: int, rows: int, samples: int, num_decodes: int) -> StepInputs:
        table = self._now.device("block_table", rows * self.max_blocks)
        return StepInputs(
            token_ids=self._now.device("token_ids", tokens),
            positions=self._now.device("positions", tokens),
            rope_rows=self._now.device("rope_rows", tokens),
            slot_mapping=self._now.device("slot_mapping", tokens),
            block_table=table.view(rows, self.max_blocks),
            query_start=self._now.device("query_start", rows + 1),
            context_lens=self._now.device("context_lens", rows),
            sample_rows=self._now.device("sample_rows", samples),
            token_slots=self._now.device("token_slots", tokens),
            num_decodes=num_decodes,
        )

    def _fill(self, items: list[Scheduled], real: int) -> None:
        count = len(items)
        slots = np.fromiter((i.slot for i in items), np.int64, count)
        starts = np.fromiter((i.start for i in items), np.int64, count)
        lengths = np.fromiter((i.num_tokens for i in items), np.int64, count)
        ends = np.cumsum(lengths)
        token_slots = np.repeat(slots, lengths)
        positions = np.arange(real) - np.repeat(ends - lengths - starts, lengths)
        host = self._now.host
        host("token_slots")[:real] = token_slots
        host("positions")[:real] = positions
        host("rope_rows")[:real] = positions + self._long[token_slots] * self._length
        blocks = self._table[token_slots, positions // self.block_size].astype(np.int64)
        host("slot_mapping")[:real] = blocks * self.block_size + positions % self.block_size
        ids = host("token_ids")
        at = 0
        for item in items:
            known = self._known[item.slot]
            piece = known[item.start : item.start + item.num_tokens]
            ids[at : at + len(piece)] = piece
            ids[at + len(piece) : at + item.num_tokens] = ON_DEVICE
            at += item.num_tokens
        host("query_start")[0] = 0
        host("query_start")[1 : count + 1] = ends
        host("context_lens")[:count] = starts + lengths
        table = host("block_table")[: count * self.max_blocks].reshape(count, self.max_blocks)
        table[:] = self._table[slots]

    def _pad(self, real: int, count: int, tokens: int, rows: int, each: int) -> None:
        """Fill token rows real … tokens; sequences count … rows become ones of length 0 and `each` query."""
        host = self._now.host
        for name in ("positions", "rope_rows", "token_ids"):
            host(name)[real:tokens] = 0
        host("token_slots")[real:tokens] = self.padding_slot
        host("slot_mapping")[real:tokens] = -1
        host("query_start")[count + 1 : rows + 1] = real + each * np.arange(1, rows - count + 1)
        host("context_lens")[count:rows] = 0
        host("block_table")[count * self.max_blocks : rows * self.max_blocks] = 0

    def _fill_sampling(self, items: list[Scheduled], sampling: list[int], samples: int) -> None:
        host = self._now.host
        ends = np.cumsum([item.num_tokens for item in items], dtype=np.int64)
        count = len(sampling)
        host("sample_rows")[:count] = ends[sampling] - 1
        host("slots")[:count] = [items[i].slot for i in sampling]
        host("num_output")[:count] = [items[i].num_output for i in sampling]
        host("sample_rows")[count:samples] = np.arange(count, samples)
        host("slots")[count:samples] = self.padding_slot
        host("num_output")[count:samples] = 0
