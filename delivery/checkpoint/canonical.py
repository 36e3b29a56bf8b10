"""A source under canonical names: fused layouts split, embeddings tied as stored, one dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from delivery.checkpoint.header import Region
from delivery.checkpoint.layouts import layout_for
from delivery.checkpoint.outline import Outline, PredictedOutline
from delivery.checkpoint.pieces import Piece, same
from delivery.checkpoint.source import Headed, Source
from delivery.checkpoint.tokenizer_files import made_tokenizer
from delivery.errors import DataError
from delivery.model.families import family_for

if TYPE_CHECKING:
    import torch

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROUTERS = ("gate", "router", "shared_expert_gate")
_FLOATS = ("float32", "bfloat16", "float16")


class Canonical:
    """What is written: names and config of a class that `delivery.model` and transformers know.

    Opening reads no weight. `config` and `notes` (what was changed beside names) are final once
    `tensors` has been run through. dtype: "auto" keeps every tensor's own.
    Raises DataError `unknown-architecture`, `layout-unsupported` on opening.
    """

    def __init__(self, source: Source, dtype: str = "auto", *, trust_remote_code: bool = False) -> None:
        self.source = source
        self.notes: list[str] = []
        self._dtype = dtype
        self._trust_remote_code = trust_remote_code
        self._layout = layout_for(source.config)
        self.config = self._layout.config(source.config) if self._layout else dict(source.config)
        family_for(self.config).config(self.config)
        if self._layout:
            before, after = (c["architectures"][0] for c in (source.config, self.config))
            self.notes.append(f"{before} written as {after}")
        if dtype != "auto":
            self.config |= {key: dtype for key in ("dtype", "torch_dtype") if key in self.config}
            self.config.setdefault("torch_dtype", dtype)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, Region | None]]:
        """Every tensor once, with where its bytes lie in a file of the source if they are taken as they are.

        Raises DataError `tensor-not-finite`, `dtypes-mixed`, `tensor-twice`, `layout-unsupported`.
        """
        import torch

        wanted = None if self._dtype == "auto" else getattr(torch, self._dtype)
        floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        seen: dict[torch.dtype, str] = {}
        pieces = self._tied(self._pieces())
        tower = self._tower({piece.name for piece in pieces})
        for piece in pieces:
            tensor = piece.take(self.source.tensor(piece.source))
            region = self.source.region(piece.source) if piece.take is same else None
            check_finite(piece.name, tensor)
            if wanted is not None and tensor.dtype in floats:
                tensor, region = tensor.to(wanted), None
                check_finite(piece.name, tensor, f"as {self._dtype}")
            elif "quantization_config" not in self.config and _is_weight(piece.name, tensor, tower):
                seen.setdefault(tensor.dtype, piece.name)
                if len(seen) > 1:
                    raise _mixed(seen)
            yield piece.name, tensor, region

    def names(self) -> set[str]:
        """Names of all tensors to be written; a tied head may later be left out."""
        return {piece.name for piece in self._pieces()}

    def outline(self) -> Outline | None:
        """What will be written, from headers alone; None where the source's tensors have none.

        A head that is equal to the embedding counts, though it will be left out.
        """
        source = self.source
        if not isinstance(source, Headed):
            return None
        pieces = {piece.name: piece for piece in self._pieces()}

        def shape(name: str) -> tuple[int, ...]:
            return pieces[name].shape(source.shape(pieces[name].source))

        return PredictedOutline(self.config, pieces, shape, self.size_bytes)

    def files(self) -> Mapping[str, Path | bytes]:
        """The files to copy besides the weights, plus a `tokenizer.json` if the source has none."""
        files = dict(self.source.files())
        folder = self.source.path
        if folder.is_dir():
            made, note = made_tokenizer(
                folder, generic=self._layout is not None, trust_remote_code=self._trust_remote_code
            )
            files |= made
            self.notes += [note] if note else []
        return files

    @property
    def size_bytes(self) -> int:
        """Approximate number of bytes to read."""
        return self.source.size_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the conversion in bytes, without the interpreter."""
        return self.source.peak_bytes

    def _pieces(self) -> list[Piece]:
        names = self.source.names()
        if self._layout is None:
            return [Piece(name, name) for name in names]
        pieces = list(self._layout.pieces(self.source.config, iter(names)))
        seen: set[str] = set()
        for piece in pieces:
            if piece.name in seen:
                raise DataError(
                    "tensor-twice",
                    f"two tensors of the source become {piece.name!r}",
                    why=f"{piece.source!r} is one of them",
                )
            seen.add(piece.name)
        return pieces

    def _tower(self, names: set[str]) -> str:
        """What the names of the language model's tensors begin with; "" where it has no embedding."""
        family = family_for(self.config)
        return next((f"{root}." for root in family.roots if f"{root}.{family.embed}.weight" in names), "")

    def _tied(self, pieces: list[Piece]) -> list[Piece]:
        """Whether the head is the embedding follows what is stored; the config is made to say so."""
        by_name = {piece.name: piece for piece in pieces}
        if _EMBED not in by_name:
            return pieces
        says_tied = family_for(self.config).config(self.config).tie_embeddings
        stored = any(name.startswith("lm_head.") for name in by_name)
        if not stored and not says_tied:
            self.config["tie_word_embeddings"] = True
            self.notes.append("no lm_head is stored: tie_word_embeddings set to true")
        elif stored and says_tied and _HEAD in by_name:
            if self._equal(by_name[_HEAD], by_name[_EMBED]):
                self.notes.append("lm_head equals the embedding and is tied to it: stored once")
                return [piece for piece in pieces if piece.name != _HEAD]
            self.config["tie_word_embeddings"] = False
            self.notes.append("lm_head differs from the embedding: tie_word_embeddings set to false")
        return pieces

    def _equal(self, one: Piece, other: Piece) -> bool:
        import torch

        a, b = (piece.take(self.source.tensor(piece.source)) for piece in (one, other))
        return a.dtype == b.dtype and torch.equal(a, b)


def check_finite(name: str, tensor: torch.Tensor, how: str = "") -> None:
    """Raises DataError `tensor-not-finite`, naming the tensor and how many values are NaN or infinite."""
    import torch

    if not tensor.dtype.is_floating_point or tensor.numel() == 0:
        return
    values = tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor
    low, high = torch.aminmax(values)
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return
    bad = int((~torch.isfinite(values)).sum())
    raise DataError(
        "tensor-not-finite",
        f"tensor {name!r} holds NaN or infinite values",
        why=f"{bad} of {tensor.numel()} values{f' {how}' if how else ''}",
        hint="another --dtype" if how else "the training run or the copy is damaged; get a good one",
    )


def _is_weight(name: str, tensor: torch.Tensor, tower: str) -> bool:
    """Whether a tensor should share the dtype of its like: a float matrix of the decoder, no router."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    matrix = tensor.dim() > 1 and tensor.is_floating_point()
    return matrix and name.startswith(tower) and module not in _ROUTERS


def _mixed(seen: Mapping[torch.dtype, str]) -> DataError:
    found = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in seen.items())
    return DataError(
        "dtypes-mixed",
        "the checkpoint's weights have different dtypes",
        why=found,
        hint=f"--dtype {' or '.join(_FLOATS[1:])} writes all of them in one",
    )
