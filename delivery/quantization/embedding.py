"""The embedding table in 4 bits: rounded to nearest before any layer is calibrated on its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from delivery.errors import UsageError
from delivery.qtensor import QTensor
from delivery.quantization.grid import round_to_grid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delivery.model.load import WeightSource
    from delivery.quantization.options import Options

FORMAT = "deliver"
"""The only format that can store it; the others quantise linear layers only."""
_ROWS = 8192


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """The table's name, its shape [rows, columns], and its group size."""

    prefix: str
    rows: int
    columns: int
    group_size: int


def check_embedding_format(options: Options, form: str) -> None:
    """Raises UsageError `format-refuses` where a quantised embedding is asked for in another format."""
    if options.group_sizes.embedding is not None and form != FORMAT:
        raise UsageError(
            "format-refuses",
            f"format {form} cannot represent what was requested",
            why=f"a quantised embedding has no place in it; only the engine's own format ({FORMAT}) has one",
            hint=f"--format {FORMAT}; or leave embedding=… out of --group-size",
        )


@torch.no_grad()
def quantize_embedding(source: WeightSource, plan: EmbeddingPlan, options: Options) -> QTensor:
    """The table [V, H] in 4 bits, each group of a row on its own grid; some thousand rows at a time.

    Raises DataError `weight-not-finite`.
    """
    table = source.tensor(f"{plan.prefix}.weight")
    grid = options.grid(plan.group_size)
    parts = [round_to_grid(rows, grid) for rows in table.split(_ROWS)]
    zero_points = [p.zero_point for p in parts if p.zero_point is not None]
    return QTensor(
        qdata=torch.cat([p.qdata for p in parts]),
        scale=torch.cat([p.scale for p in parts]),
        zero_point=torch.cat(zero_points) if zero_points else None,
        group_size=plan.group_size,
        bits=grid.bits,
    )


class WithEmbedding:
    """A checkpoint with another embedding table: what the quantised model will see."""

    def __init__(self, source: WeightSource, prefix: str, table: QTensor) -> None:
        self._source = source
        self._tables: Mapping[str, QTensor] = {prefix: table}

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def tensor(self, name: str, device: Any = "cpu") -> torch.Tensor:
        return self._source.tensor(name, device)

    def weight(self, prefix: str, device: Any = "cpu") -> torch.Tensor | QTensor:
        found = self._tables.get(prefix)
        return self._source.weight(prefix, device) if found is None else found.to(device)
