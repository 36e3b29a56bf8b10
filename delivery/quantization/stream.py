"""Samples streaming through a model: hidden states between two blocks, a piece on the device at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from delivery.model.attention import DenseAttention

CHUNK_TOKENS = {"cpu": 1024, "cuda": 8192}


@dataclass(slots=True)
class Piece:
    """Some whole sequences.

    hidden: [T, H], kept where `Stream.home` says. lengths: tokens of each. positions: int64 [T] on the
    device. mixer: its attention, which keeps the rotary tables of these positions. token_ids: int64 [T],
    where the piece came from text.
    """

    hidden: torch.Tensor
    lengths: tuple[int, ...]
    positions: torch.Tensor
    mixer: DenseAttention
    token_ids: torch.Tensor | None = None


class Stream:
    """The hidden states of all samples at one place in the model.

    device: where blocks run. home: where hidden states wait between blocks; the device itself when they
    are small compared with its memory, else the CPU.
    """

    def __init__(self, pieces: list[Piece], device: torch.device, home: torch.device) -> None:
        self.pieces = pieces
        self.device = device
        self.home = home

    @classmethod
    def start(
        cls,
        token_ids: Sequence[Sequence[int]],
        embed: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device | str = "cpu",
        home: torch.device | str | None = None,
        chunk_tokens: int | None = None,
    ) -> Stream:
        """Embed samples. embed: int64 [T] → hidden [T, H]."""
        device = torch.device(device)
        home = torch.device(home) if home is not None else device
        size = chunk_tokens or CHUNK_TOKENS.get(device.type, 1024)
        pieces = []
        for group in _packed(token_ids, size):
            flat = torch.tensor([t for s in group for t in s], dtype=torch.int64, device=device)
            lengths = tuple(len(s) for s in group)
            positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
            pieces.append(Piece(embed(flat).to(home), lengths, positions, DenseAttention(lengths), flat))
        return cls(pieces, device, home)

    @property
    def tokens(self) -> int:
        return sum(sum(p.lengths) for p in self.pieces)

    @property
    def size_bytes(self) -> int:
        """Of all hidden states."""
        return sum(p.hidden.nbytes for p in self.pieces)

    def run(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Each piece with its hidden states [T, H] on the device."""
        for piece in self.pieces:
            yield piece, piece.hidden.to(self.device)

    def put(self, piece: Piece, hidden: torch.Tensor) -> None:
        """Replace a piece's hidden states by those after a block."""
        piece.hidden = hidden.to(self.home)

    def copy(self) -> Stream:
        """A second stream from the same place (hidden states are never changed in place)."""
        return Stream([replace(p) for p in self.pieces], self.device, self.home)

    def save(self, path: Path) -> None:
        """Write the hidden states whole or not at all."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        save_file({f"{i:06d}": p.hidden.contiguous() for i, p in enumerate(self.pieces)}, temporary)
        os.replace(temporary, path)

    def restore(self, path: Path) -> None:
        """Read back what `save` wrote for the same samples."""
        saved = load_file(path)
        for i, piece in enumerate(self.pieces):
            piece.hidden = saved[f"{i:06d}"].to(self.home)


def _packed(samples: Sequence[Sequence[int]], size: int) -> Iterator[list[Sequence[int]]]:
    waiting: list[Sequence[int]] = []
    for sample in samples:
        if waiting and sum(map(len, waiting)) + len(sample) > size:
            yield waiting
            waiting = []
        waiting.append(sample)
    if waiting:
        yield waiting
