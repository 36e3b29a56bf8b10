"""From SchedulerOutput to a step's inputs: persistent per-slot state, staged once, copied once.

Host arrays are written in place and copied into fixed device buffers in two transfers, so a recorded
decode step finds its inputs at the same addresses every time. On a GPU the staging memory is pinned
and there are several sets, so that one may be filled while another still travels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from delivery.engine.outputs import Scheduled, SchedulerOutput
from delivery.engine.paged import StepInputs

ON_DEVICE = -1
"""Stands for a token id that only the device knows: the last one sampled for its slot."""
_STAGES = 3


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
        # One slot more than requests can run: prompts that are scored go there, and padding points at it.
        self.spare_slot = sequences
        slots = sequences + 1
        self._known: list[np.ndarray] = [np.empty(0, np.int32)] * slots
        self._long = np.zeros(slots, np.int64)
        self._table = np.zeros((slots, self.max_blocks), np.int32)
        self._blocks = np.zeros(slots, np.int64)
        self._wide = _Fields(
            {"positions": tokens, "rope_rows": tokens, "slot_mapping": tokens, "token_slots": tokens}
            | {"sample_rows": sequences, "slots": sequences, "num_output": sequences},
            np.dtype(np.int64),
            device,
        )
        self._narrow = _Fields(
            {"token_ids": tokens, "query_start": sequences + 1, "context_lens": sequences}
            | {"block_table": sequences * self.max_blocks},
            np.dtype(np.int32),
            device,
        )

    def build(self, work: SchedulerOutput, pad_decodes: int | None = None) -> Batch:
        """The batch of a step. pad_decodes: a batch of decodes alone is filled up to so many rows, with
        sequences of length 0 that store nothing."""
        for new in work.admitted:
            self._known[new.slot] = np.asarray(new.token_ids, np.int32)
            self._long[new.slot] = self._switch is not None and len(new.token_ids) > self._switch
            self._table[new.slot, : len(new.block_ids)] = new.block_ids
            self._blocks[new.slot] = len(new.block_ids)
        items = work.scheduled
        for item in items:
            if item.new_block_ids:
                first = self._blocks[item.slot]
                self._table[item.slot, first : first + len(item.new_block_ids)] = item.new_block_ids
                self._blocks[item.slot] += len(item.new_block_ids)
        order = [i for i, item in enumerate(items) if item.num_tokens == 1]
        num_decodes = len(order)
        order += [i for i, item in enumerate(items) if item.num_tokens != 1]
        ordered = [items[i] for i in order]
        rows = max(pad_decodes or 0, len(ordered)) if num_decodes == len(ordered) else len(ordered)
        tokens = work.num_tokens + rows - len(ordered)
        self._wide.next()
        self._narrow.next()
        self._fill(ordered, work.num_tokens, tokens, rows)
        sampling = [i for i, item in enumerate(ordered) if item.samples]
        self._fill_sampling(ordered, sampling, rows if rows > len(ordered) else len(sampling))
        self._wide.send()
        self._narrow.send()
        samples = rows if rows > len(ordered) else len(sampling)
        inputs = self._inputs(tokens, rows, samples, rows if rows > len(ordered) else num_decodes)
        return Batch(
            inputs=inputs,
            order=order,
            sampling=sampling,
            slots=self._wide.device("slots", samples),
            token_slots=self._wide.device("token_slots", tokens),
            num_output=self._wide.device("num_output", samples),
        )

    def blank(self, rows: int) -> StepInputs:
        """Inputs of `rows` decodes that are all padding: what a recording of that size is made with."""
        self._wide.next()
        self._narrow.next()
        self._pad(0, 0, rows, rows)
        self._narrow.host("query_start")[0] = 0
        self._wide.host("sample_rows")[:rows] = np.arange(rows)
        self._wide.send()
        self._narrow.send()
        return self._inputs(rows, rows, rows, rows)

    def _inputs(self, tokens: int, rows: int, samples: int, num_decodes: int) -> StepInputs:
        table = self._narrow.device("block_table", rows * self.max_blocks)
        return StepInputs(
            token_ids=self._narrow.device("token_ids", tokens),
            positions=self._wide.device("positions", tokens),
            rope_rows=self._wide.device("rope_rows", tokens),
            slot_mapping=self._wide.device("slot_mapping", tokens),
            block_table=table.view(rows, self.max_blocks),
            query_start=self._narrow.device("query_start", rows + 1),
            context_lens=self._narrow.device("context_lens", rows),
            sample_rows=self._wide.device("sample_rows", samples),
            num_decodes=num_decodes,
        )

    def _fill(self, items: list[Scheduled], real: int, tokens: int, rows: int) -> None:
        count = len(items)
        slots = np.fromiter((i.slot for i in items), np.int64, count)
        starts = np.fromiter((i.start for i in items), np.int64, count)
        lengths = np.fromiter((i.num_tokens for i in items), np.int64, count)
        ends = np.cumsum(lengths)
        token_slots = np.repeat(slots, lengths)
        positions = np.arange(real) - np.repeat(ends - lengths - starts, lengths)
        wide, narrow = self._wide.host, self._narrow.host
        wide("token_slots")[:real] = token_slots
        wide("positions")[:real] = positions
        wide("rope_rows")[:real] = positions + self._long[token_slots] * self._length
        blocks = self._table[token_slots, positions // self.block_size].astype(np.int64)
        wide("slot_mapping")[:real] = blocks * self.block_size + positions % self.block_size
        ids = narrow("token_ids")
        at = 0
        for item in items:
            known = self._known[item.slot]
            piece = known[item.start : item.start + item.num_tokens]
            ids[at : at + len(piece)] = piece
            ids[at + len(piece) : at + item.num_tokens] = ON_DEVICE
            at += item.num_tokens
        narrow("query_start")[0] = 0
        narrow("query_start")[1 : count + 1] = ends
        narrow("context_lens")[:count] = starts + lengths
        table = narrow("block_table")[: rows * self.max_blocks].reshape(rows, self.max_blocks)
        table[:count] = self._table[slots]
        if rows > count:
            self._pad(real, count, tokens, rows)

    def _pad(self, real: int, count: int, tokens: int, rows: int) -> None:
        """Fill token rows real … tokens and sequences count … rows with ones of length 0."""
        wide, narrow = self._wide.host, self._narrow.host
        for name in ("token_slots", "positions", "rope_rows"):
            wide(name)[real:tokens] = 0
        wide("slot_mapping")[real:tokens] = -1
        narrow("token_ids")[real:tokens] = 0
        narrow("query_start")[count + 1 : rows + 1] = real + np.arange(1, rows - count + 1)
        narrow("context_lens")[count:rows] = 0
        table = narrow("block_table")[: rows * self.max_blocks].reshape(rows, self.max_blocks)
        table[count:] = 0

    def _fill_sampling(self, items: list[Scheduled], sampling: list[int], samples: int) -> None:
        wide = self._wide.host
        ends = np.cumsum([item.num_tokens for item in items])
        count = len(sampling)
        wide("sample_rows")[:count] = ends[sampling] - 1
        wide("slots")[:count] = [items[i].slot for i in sampling]
        wide("num_output")[:count] = [items[i].num_output for i in sampling]
        if samples > count:
            wide("sample_rows")[count:samples] = np.arange(count, samples)
            wide("slots")[count:samples] = self.spare_slot
            wide("num_output")[count:samples] = 0


class _Fields:
    """Named arrays in one allocation: host stages, and one device buffer that they are copied into."""

    def __init__(
        self, sizes: dict[str, int], dtype: np.dtype[np.signedinteger], device: torch.device
    ) -> None:
        self._span: dict[str, tuple[int, int]] = {}
        total = 0
        for name, size in sizes.items():
            self._span[name] = (total, total + size)
            total += -(-size // 32) * 32  # every field starts on a 128-byte line
        cuda = device.type == "cuda"
        kind = torch.int64 if dtype == np.int64 else torch.int32
        self._stages = [
            torch.zeros(total, dtype=kind, pin_memory=cuda) for _ in range(_STAGES if cuda else 1)
        ]
        self._buffer = torch.zeros(total, dtype=kind, device=device) if cuda else self._stages[0]
        self._sent = [torch.cuda.Event() for _ in self._stages] if cuda else []
        self._at = 0
        self._host = self._stages[0].numpy()

    def next(self) -> None:
        """Turn to the next stage; waits only if its last copy has not left yet."""
        self._at = (self._at + 1) % len(self._stages)
        if self._sent:
            self._sent[self._at].synchronize()
        self._host = self._stages[self._at].numpy()

    def host(self, name: str) -> np.ndarray:
        first, last = self._span[name]
        return self._host[first:last]

    def send(self) -> None:
        if self._sent:
            self._buffer.copy_(self._stages[self._at], non_blocking=True)
            self._sent[self._at].record()

    def device(self, name: str, size: int) -> torch.Tensor:
        first, _ = self._span[name]
        return self._buffer[first : first + size]
