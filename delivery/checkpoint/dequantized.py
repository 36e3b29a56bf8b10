"""A quantised checkpoint read as floating point: every packed layer becomes its `weight`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.checkpoint.directory_source import DirectorySource
from delivery.formats import format_of

if TYPE_CHECKING:
    import torch

_KEPT = ("bias",)
_KV_SCALES = ("k_scale", "v_scale")


class DequantizedSource:
    """See `Source`. Weights get the dtype that the config names (bfloat16 where it names none)."""

    format = "safetensors"

    def __init__(self, inner: DirectorySource) -> None:
        self._inner = inner
        self.path = inner.path
        checkpoint = inner.checkpoint
        quantization = checkpoint.quantization or {}
        reader = format_of(quantization)
        self.config: Mapping[str, Any] = {k: v for k, v in inner.config.items() if k != "quantization_config"}
        stems = {name.rpartition(".")[0] for name in checkpoint.names()}
        self._packed = {s for s in stems if s and reader.is_quantized(s, checkpoint.has, quantization)}
        self._names = tuple(dict.fromkeys(n for n in map(self._renamed, checkpoint.names()) if n))

    def names(self) -> tuple[str, ...]:
        return self._names

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        from delivery.qtensor import QTensor

        prefix, _, leaf = name.rpartition(".")
        if leaf != "weight" or prefix not in self._packed:
            return self._inner.tensor(name)
        weight = self._inner.checkpoint.weight(prefix)
        stated = str(self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16")
        dtype: torch.dtype = getattr(torch, stated.removeprefix("torch."))
        return weight.dequantize(dtype) if isinstance(weight, QTensor) else weight.to(dtype)

    def region(self, name: str) -> None:
        return None

    def files(self) -> Mapping[str, Path | bytes]:
        return self._inner.files()

    @property
    def size_bytes(self) -> int:
        return 2 * sum(self._elements(name) for name in self._names)

    @property
    def peak_bytes(self) -> int:
        # The values as bytes, as float32 beside their scales, and as they are stored.
        return max((11 * self._elements(name) for name in self._names), default=0)

    def _renamed(self, name: str) -> str:
        prefix, _, leaf = name.rpartition(".")
        if leaf in _KV_SCALES:
            return ""
        return f"{prefix}.weight" if prefix in self._packed and leaf not in _KEPT else name

    def _elements(self, name: str) -> int:
        """Number of elements of a tensor; for a packed 4-bit weight, an upper bound."""
        prefix = name.rpartition(".")[0]
        checkpoint = self._inner.checkpoint
        for leaf, per_word in (("qweight", 8), ("weight_packed", 8), ("weight", 1)):
            if checkpoint.has(f"{prefix}.{leaf}") and name.endswith(".weight"):
                return checkpoint.info(f"{prefix}.{leaf}").count * per_word
        return checkpoint.info(name).count
