"""A source under canonical names: layouts taken apart, embeddings tied as they are stored, one dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from delivery.checkpoint.layouts import layout_for
from delivery.checkpoint.pieces import Piece
from delivery.checkpoint.source import Source
from delivery.errors import DataError
from delivery.model.families import family_for

if TYPE_CHECKING:
    import torch

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROUTERS = ("gate", "router", "shared_expert_gate")
_FLOATS = ("float32", "bfloat16", "float16")


class Canonical:
    """What is written: names and config of a class that `delivery.model` and transformers know.

    `notes` says what was changed beside names, for the log. dtype: "auto" keeps every tensor's own.
    Raises DataError `unknown-architecture`, `layout-unsupported`, `tensor-twice` on opening.
    """

    def __init__(self, source: Source, dtype: str = "auto") -> None:
        self.source = source
        self.notes: list[str] = []
        self._dtype = dtype
        layout = layout_for(source.config)
        if layout is None:
            self.config = dict(source.config)
            self._pieces = [Piece(name, name) for name in source.names()]
        else:
            self.config = layout.config(source.config)
            self._pieces = list(layout.pieces(source.config, iter(source.names())))
            self.notes.append(
                f"{source.config['architectures'][0]} written as {self.config['architectures'][0]}"
            )
        family_for(self.config)
        self._check_unique()
        self._tie()
        if dtype != "auto":
            self._state_dtype(dtype)

    def names(self) -> tuple[str, ...]:
        return tuple(piece.name for piece in self._pieces)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once. Raises DataError `tensor-not-finite`, `dtypes-mixed`."""
        import torch

        wanted = None if self._dtype == "auto" else getattr(torch, self._dtype)
        seen: dict[torch.dtype, str] = {}
        for piece in self._pieces:
            tensor = piece.take(self.source.tensor(piece.source))
            check_finite(piece.name, tensor)
            if wanted is not None and tensor.dtype in (
                torch.float64,
                torch.float32,
                torch.bfloat16,
                torch.float16,
            ):
                tensor = tensor.to(wanted)
                check_finite(piece.name, tensor, f"as {self._dtype}")
            elif "quantization_config" not in self.config and _is_weight(piece.name, tensor):
                seen.setdefault(tensor.dtype, piece.name)
                if len(seen) > 1:
                    raise _mixed(seen)
            yield piece.name, tensor

    def files(self) -> Mapping[str, Path | bytes]:
        return self.source.files()

    def _check_unique(self) -> None:
        seen: set[str] = set()
        for piece in self._pieces:
            if piece.name in seen:
                raise DataError(
                    "tensor-twice",
                    f"two tensors of the source become {piece.name!r}",
                    why=f"{piece.source!r} is one of them",
                )
            seen.add(piece.name)

    def _tie(self) -> None:
        """Whether the head is the embedding follows what is stored; the config is made to say so."""
        names = set(self.names())
        if _EMBED not in names:
            return
        says_tied = family_for(self.config).config(self.config).tie_embeddings
        stored = any(name.startswith("lm_head.") for name in names)
        if not stored and not says_tied:
            self.config["tie_word_embeddings"] = True
            self.notes.append("no lm_head is stored: tie_word_embeddings set to true")
        elif stored and says_tied and _HEAD in names:
            if self._head_is_embedding():
                self._pieces = [piece for piece in self._pieces if piece.name != _HEAD]
                self.notes.append("lm_head equals the embedding and is tied to it: stored once")
            else:
                self.config["tie_word_embeddings"] = False
                self.notes.append("lm_head differs from the embedding: tie_word_embeddings set to false")

    def _head_is_embedding(self) -> bool:
        import torch

        by_name = {piece.name: piece for piece in self._pieces}
        head, embedding = (by_name[n].take(self.source.tensor(by_name[n].source)) for n in (_HEAD, _EMBED))
        return head.dtype == embedding.dtype and torch.equal(head, embedding)

    def _state_dtype(self, dtype: str) -> None:
        for key in ("dtype", "torch_dtype"):
            if key in self.config or key == "torch_dtype":
                self.config[key] = dtype


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


def _is_weight(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor should share the dtype of its like: a float matrix that is no router."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    return tensor.dim() > 1 and tensor.is_floating_point() and module not in _ROUTERS


def _mixed(seen: Mapping[torch.dtype, str]) -> DataError:
    found = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in seen.items())
    return DataError(
        "dtypes-mixed",
        "the checkpoint's weights have different dtypes",
        why=found,
        hint=f"--dtype {' or '.join(_FLOATS[1:])} writes all of them in one",
    )
