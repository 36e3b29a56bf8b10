"""Tensors from files to a GPU: several threads read into page-locked memory, from where the copy engine takes
them while the next piece is read. A mapping of the file would cost a page fault every 4 KiB."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from delivery.checkpoint.reader import torch_dtype
from delivery.errors import DataError

if TYPE_CHECKING:
    from delivery.checkpoint import Checkpoint

_THREADS = 6
_PIECE_BYTES = 16 << 20


def read_to(
    files: Checkpoint,
    names: Iterable[str],
    device: torch.device,
    stages: Callable[[], Stage] | None = None,
) -> dict[str, torch.Tensor]:
    """The named tensors on `device`. Raises DataError `shard-truncated` when a file ends too early.

    stages: makes a thread's staging memory.
    """
    make = stages or Stage
    mine = threading.local()

    def one(name: str) -> torch.Tensor:
        if not hasattr(mine, "stage"):
            mine.stage = make()
        return _one(files, name, device, mine.stage)

    wanted = list(dict.fromkeys(names))
    with ThreadPoolExecutor(_THREADS) as pool:
        # The largest first, so that threads end together.
        order = sorted(wanted, key=lambda name: -files.info(name).size_bytes)
        read = dict(zip(order, pool.map(one, order), strict=True))
    return {name: read[name] for name in wanted}


class Stage:
    """Two pieces of page-locked memory and the copies that still read from them."""

    def __init__(self, size_bytes: int = _PIECE_BYTES, *, pinned: bool = True) -> None:
        self.pieces = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self.stream = torch.cuda.Stream() if pinned else None
        self._left = [torch.cuda.Event() if pinned else None for _ in self.pieces]
        self._at = 0

    def next(self) -> torch.Tensor:
        """A piece whose copies have finished."""
        self._at ^= 1
        left = self._left[self._at]
        if left is not None:
            left.synchronize()
        return self.pieces[self._at]

    def send(self, target: torch.Tensor, count: int) -> None:
        """Copy the first `count` bytes of the piece to `target`."""
        with torch.cuda.stream(self.stream):
            target.copy_(self.pieces[self._at][:count], non_blocking=True)
            left = self._left[self._at]
            if left is not None:
                left.record()

    def finish(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


def _one(files: Checkpoint, name: str, device: torch.device, stage: Stage) -> torch.Tensor:
    info, region = files.info(name), files.region(name)
    flat = torch.empty(info.size_bytes, dtype=torch.uint8, device=device)
    done = 0
    with region.path.open("rb", buffering=0) as stream:
        stream.seek(region.offset)
        while done < info.size_bytes:
            piece = stage.next()
            count = min(len(piece), info.size_bytes - done)
            read = stream.readinto(piece.numpy().data[:count])
            if not read:
                raise DataError(
                    "shard-truncated",
                    f"{region.path} ends within tensor {name}",
                    why=f"expected {info.size_bytes} bytes, got {done}",
                )
            stage.send(flat[done : done + read], read)
            done += read
    stage.finish()
    return flat.view(torch_dtype(info.dtype)).view(info.shape)
