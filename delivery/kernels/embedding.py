"""Token embedding: rows of the table, times the family's constant scale."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.targets import why_not_cpu, why_not_triton


def reference(table: torch.Tensor, token_ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """table [V, H], token_ids int32 or int64 [T] → [T, H] in the table's dtype.

    Gemma scales by sqrt(H), rounded to the table's dtype first.
    """
    rows = table[token_ids.to(torch.int64)]
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=table.dtype, device=table.device)


def _triton(table: torch.Tensor, token_ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    from delivery.kernels.gpu.embedding import embedding

    return embedding(table, token_ids, scale)


def _cases() -> Iterator[Case]:
    for hidden, scale in ((48, 1.0), (576, 24.0), (4096, 64.0)):

        def make(
            device: torch.device, dtype: torch.dtype, seed: int, h: int = hidden, by: float = scale
        ) -> tuple[object, ...]:
            generator = torch.Generator("cpu").manual_seed(seed)
            table = torch.randn(97, h, generator=generator).to(device, dtype)
            token_ids = torch.randint(0, 97, (7,), generator=generator).to(device)
            return table, token_ids, by

        yield Case(f"h{hidden}", make, {torch.float32: 1e-7, torch.float16: 1e-3, torch.bfloat16: 6e-3})


OP = Op(
    name="embedding",
    reference=reference,
    backends={"cpu": Backend(reference, why_not_cpu), "triton": Backend(_triton, why_not_triton)},
    cases=_cases,
)
