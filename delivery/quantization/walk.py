"""Walk the float model block by block and gather the statistics of its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from delivery.errors import DataError
from delivery.model import block, embed, load_block, load_ends
from delivery.model.weights import Linear
from delivery.qtensor import QTensor
from delivery.quantization.inputs import input_groups
from delivery.quantization.observe import watch_inputs
from delivery.quantization.running import in_dtype
from delivery.quantization.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delivery.model import ModelConfig
    from delivery.model.load import WeightSource
    from delivery.quantization.statistics import InputStatistics

_HOME_SHARE = 0.25


def running_dtype(name: str, stored: str, device: str) -> torch.dtype:
    """The dtype that blocks compute in. `auto`: float32 on a CPU, the checkpoint's own on a GPU."""
    if name != "auto":
        found = getattr(torch, name)
    else:
        found = torch.float32 if device == "cpu" else getattr(torch, stored, torch.bfloat16)
    assert isinstance(found, torch.dtype)
    return found


def start_stream(
    source: WeightSource,
    config: ModelConfig,
    samples: Sequence[Sequence[int]],
    device: str,
    dtype: torch.dtype,
) -> Stream:
    """Embed the samples. The table is read, used and dropped; hidden states wait on the device if small."""
    table = load_ends(source, config, device).table
    home = _home(len(samples) and sum(map(len, samples)) * config.hidden_size * dtype.itemsize, device)
    return Stream.start(samples, lambda ids: embed(config, table, ids).to(dtype), device, home)


@torch.no_grad()
def observe_layer(
    source: WeightSource, config: ModelConfig, layer: int, stream: Stream, dtype: torch.dtype
) -> dict[str, InputStatistics]:
    """Run block `layer` over the stream, move the stream behind it; statistics by input.

    Raises DataError `already-quantised`.
    """
    weights = load_block(source, config, layer, stream.device)
    for linear in weights.linears.values():
        if isinstance(linear, Linear) and isinstance(linear.weight, QTensor):
            raise DataError(
                "already-quantised",
                f"{linear.name} is already quantised",
                why=f"its weights have {linear.weight.bits} bits",
                hint="calibrate the float checkpoint that it was made from",
            )
    groups = input_groups(weights.linears)
    watched, watches = watch_inputs(in_dtype(weights, dtype), groups, stream.device, with_gram=False)
    for piece, hidden in stream.run():
        stream.put(piece, block(config, layer, watched, hidden, piece.positions, piece.mixer))
    return {key: watch.statistics for key, watch in watches.items()}


def _home(size_bytes: int, device: str) -> str:
    if not device.startswith("cuda"):
        return "cpu"
    free, _ = torch.cuda.mem_get_info()
    return device if size_bytes < _HOME_SHARE * free else "cpu"
