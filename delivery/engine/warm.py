"""Warm-up: run the steps that are not recorded once on padding, so that no request waits for a compiler."""

from __future__ import annotations

import torch

from delivery.engine.graphs import decode_sizes, mixed_shapes
from delivery.engine.inputs import resolved_ids
from delivery.engine.outputs import Admitted, Scheduled, SchedulerOutput
from delivery.engine.request import SamplingParams
from delivery.engine.runner import ModelRunner

_CLASSES = (1, 17, 129, 257)
"""The fewest sequences of each class for which attention is compiled apart (`sequence_lanes`)."""


def mixtures(tokens: int, sequences: int) -> list[tuple[int, int, int]]:
    """(decodes, prompts, tokens) of steps that between them launch every kernel that a large step may."""
    found = [(0, 1, tokens), (0, 1, max(1, tokens // 2))]
    if 2 * sequences <= tokens:
        found.append((0, sequences, tokens))
    for count in (n for n in _CLASSES if n <= sequences):
        decodes = min(count, sequences - 1)
        prompts = min(count, sequences - decodes)
        if decodes and prompts and decodes + 2 * prompts <= tokens:
            found.append((decodes, prompts, tokens))
    return found


def unrecorded(runner: ModelRunner, tokens: int, sequences: int) -> list[tuple[int, int, int]]:
    """`mixtures`, and the smaller steps of those kinds that the runner has no recordings of."""
    found = mixtures(tokens, sequences)
    if runner.mixed is None:
        found += [(0, 1, size) for size in sorted({size for size, _ in mixed_shapes(tokens, sequences)})]
    if runner.recorded is None:
        found += [(size, 0, size) for size in decode_sizes(min(sequences, tokens))]
    return found


@torch.inference_mode()
def warm_up(runner: ModelRunner, tokens: int, sequences: int) -> None:
    """Run steps of at most so many tokens and sequences, the head and the sampler. Writes to the cache's
    first block and to the spare slot, which hold nothing yet."""
    for decodes, prompts, size in unrecorded(runner, tokens, sequences):
        batch = runner.stage.build(_nothing(runner, decodes, prompts, size))
        runner.hidden(resolved_ids(batch, runner.last_token), batch.inputs)
    model = runner.model
    for rows in decode_sizes(sequences):
        hidden = torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, device=runner.device)
        runner.sampler.warm_up(model.final(hidden))


def _nothing(runner: ModelRunner, decodes: int, prompts: int, tokens: int) -> SchedulerOutput:
    slot, longest = runner.stage.spare_slot, runner.rotary.length
    each = max(1, min((tokens - decodes) // prompts, longest)) if prompts else 1
    lengths = [1] * decodes + [each] * prompts
    new = Admitted(slot, "", (0,) * each, 0, (), SamplingParams(max_tokens=1))
    items = tuple(Scheduled(slot, 0, length, (), False, 0) for length in lengths)
    return SchedulerOutput(0, (new,), items, sum(lengths))
