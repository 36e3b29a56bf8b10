"""Verify a written checkpoint: headers and index, finite scales, tensors that must be unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from delivery.checkpoint.canonical import check_finite
from delivery.checkpoint.reader import Checkpoint
from delivery.errors import DataError

_SCALES = ("scales", "scale", "weight_scale", "weight_scale_inv", "input_scale", "k_scale", "v_scale")


def verify_export(out: Path, source: Checkpoint, unchanged: Iterable[str]) -> int:
    """Check a quantised checkpoint against its source; returns the number of tensors compared.

    Opening checks index and headers against each other; every scale must be finite; every tensor
    named in `unchanged` must be bit-identical to the source's. One tensor is in memory at a time.
    Raises DataError: what `Checkpoint.open` raises, `tensor-not-finite`, `tensor-changed`.
    """
    written = Checkpoint.open(out)
    for name in written.names():
        if name.rpartition(".")[2] in _SCALES:
            check_finite(name, written.tensor(name))
    count = 0
    for name in unchanged:
        if not _same(source, written, name):
            raise DataError(
                "tensor-changed",
                f"tensor {name!r} differs from the source",
                why=f"it should be unchanged, but differs between {source.path} and {out}",
                hint="this is a bug in the export; please report it",
            )
        count += 1
    return count


def _same(source: Checkpoint, written: Checkpoint, name: str) -> bool:
    import torch

    if not written.has(name):
        return False
    before, after = source.tensor(name), written.tensor(name)
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        return False
    if before.numel() == 0:
        return True
    raw = (t.reshape(-1).view(torch.uint8) for t in (before, after))
    return torch.equal(*raw)
