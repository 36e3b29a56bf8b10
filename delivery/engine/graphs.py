"""CUDA graphs of steps: the decoder blocks of a step, padded to a recorded size, are one launch.

Two kinds. Decodes alone, by batch size. And steps of any mixture of prompts, pieces of prompts and decodes,
by tokens and sequences, up to a size from which on the card is busy for longer than its host.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from delivery.engine.inputs import Batch, resolved_ids
from delivery.engine.need import MOST_MIXED_TOKENS as MOST_MIXED_TOKENS
from delivery.kernels.gpu.recording_stream import recording_stream
from delivery.model.config import ModelConfig

if TYPE_CHECKING:
    from delivery.engine.engine_model import EngineModel
    from delivery.engine.runner import ModelRunner

_FEW_SEQUENCES = 16


def why_not(model: EngineModel) -> str | None:
    """Why no step of a model can be recorded."""
    if any("router" in block.linears and block.experts is None for block in model.blocks):
        return "quantised experts run one by one, as the routing falls"
    return None


def why_not_mixed(config: ModelConfig) -> str | None:
    """Why steps with prompts cannot be recorded, where steps of decodes alone can."""
    if config.delta is not None:
        return "gated delta layers go through prompts of any length, one by one"
    return None


def decode_sizes(most: int) -> list[int]:
    """Batch sizes worth a recording, up to `most`: dense where a step is short, sparse where it is long."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 1, 32)]
    return [size for size in sizes if size < most] + [most]


def mixed_shapes(tokens: int, sequences: int) -> list[tuple[int, int]]:
    """(tokens, sequences) worth a recording, for steps of at most so many of each, in rising order."""
    most = min(tokens, MOST_MIXED_TOKENS)
    sizes = [16, 32, 64, *range(128, 1024, 128), *range(1024, MOST_MIXED_TOKENS + 1, 256)]
    sizes = [size for size in sizes if size < most] + [most]
    batches = sorted({min(_FEW_SEQUENCES, sequences), sequences})
    return [(size, batch) for size in sizes for batch in batches]


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """No garbage collection: what it would destroy on the device cannot be destroyed during a recording."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaGraphs:
    """Recordings in one memory pool, largest first so that the smaller ones reuse its memory. The final norm
    and the head run behind the replay."""

    def __init__(self, runner: ModelRunner, sizes: list[int], shapes: list[tuple[int, int]]) -> None:
        self._runner = runner
        self._sizes = sorted(sizes)
        self._shapes = sorted(shapes)
        rows = max([*self._sizes, *(tokens for tokens, _ in self._shapes)])
        config = runner.model.config
        self._hidden = torch.zeros(rows, config.hidden_size, dtype=runner.model.dtype, device=runner.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = recording_stream()
        stage = runner.stage
        with _nothing_collected():
            self._mixed = {
                shape: self._record(stage.blank(*shape, decodes=False)) for shape in reversed(self._shapes)
            }
            self._decodes = {
                size: self._record(stage.blank(size, size, decodes=True)) for size in reversed(self._sizes)
            }
        torch.cuda.empty_cache()

    def padded(self, decodes: int) -> int | None:
        at = bisect_left(self._sizes, decodes)
        return self._sizes[at] if at < len(self._sizes) else None

    def shape(self, tokens: int, sequences: int) -> tuple[int, int] | None:
        """The smallest recorded shape that holds a step of any mixture."""
        return next((s for s in self._shapes if s[0] >= tokens and s[1] >= sequences), None)

    def run(self, batch: Batch, last_token: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of decodes of a recorded size; the recording reads the runner's `last_token`."""
        rows = batch.token_slots.shape[0]
        self._decodes[rows].replay()
        return self._runner.model.final(self._hidden[:rows])

    def run_mixed(self, batch: Batch) -> torch.Tensor:
        """Logits of the rows that sample, of a batch of a recorded shape."""
        inputs = batch.inputs
        shape = batch.token_slots.shape[0], inputs.context_lens.shape[0]
        self._mixed[shape].replay()
        return self._runner.model.final(self._hidden[inputs.sample_rows])

    @torch.inference_mode()
    def _record(self, batch: Batch) -> torch.cuda.CUDAGraph:
        runner, out = self._runner, self._hidden[: batch.token_slots.shape[0]]
        # Kernels are compiled and libraries make their handles outside of the recording.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            runner.hidden(resolved_ids(batch, runner.last_token), batch.inputs, out)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool)
            runner.hidden(resolved_ids(batch, runner.last_token), batch.inputs, out)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph
