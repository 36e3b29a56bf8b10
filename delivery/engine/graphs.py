"""CUDA graphs of decode steps: a batch of decodes, padded to a recorded size, is one launch."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import torch

from delivery.engine.paged import StepInputs

if TYPE_CHECKING:
    from delivery.engine.engine_model import EngineModel
    from delivery.engine.runner import ModelRunner

_WARM_UPS = 2


def why_not(model: EngineModel) -> str | None:
    """Why a model's decode steps cannot be recorded."""
    if any("router" in block.linears and block.experts is None for block in model.blocks):
        return "quantised experts run one by one, as the routing falls"
    return None


def decode_sizes(most: int) -> list[int]:
    """Batch sizes worth a recording, up to `most`: dense where a step is short, sparse where it is long."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 1, 32)]
    return [size for size in sizes if size < most] + [most]


class CudaGraphs:
    """Recordings of the decoder blocks by batch size, in one memory pool, largest first so that the
    smaller ones reuse its memory. The final norm and the head run behind the replay."""

    def __init__(self, runner: ModelRunner, sizes: list[int]) -> None:
        self._runner = runner
        self._sizes = sorted(sizes)
        most = self._sizes[-1]
        config, device = runner.model.config, runner.device
        self._token_ids = torch.zeros(most, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(most, config.hidden_size, dtype=runner.model.dtype, device=device)
        pool = torch.cuda.graph_pool_handle()
        self._graphs = {size: self._record(size, pool) for size in reversed(self._sizes)}

    def padded(self, decodes: int) -> int | None:
        at = bisect_left(self._sizes, decodes)
        return self._sizes[at] if at < len(self._sizes) else None

    def run(self, inputs: StepInputs, token_ids: torch.Tensor) -> torch.Tensor:
        rows = token_ids.shape[0]
        self._token_ids[:rows].copy_(token_ids)
        self._graphs[rows].replay()
        return self._runner.model.final(self._hidden[:rows])

    @torch.inference_mode()
    def _record(self, size: int, pool: Any) -> torch.cuda.CUDAGraph:
        inputs = self._runner.stage.blank(size)
        token_ids, out = self._token_ids[:size], self._hidden[:size]
        # Kernels are compiled and libraries make their handles outside of the recording.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                out.copy_(self._runner.hidden(token_ids, inputs))
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out.copy_(self._runner.hidden(token_ids, inputs))
        return graph
