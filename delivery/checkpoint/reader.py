"""Checkpoint: a Hugging Face model directory, opened for reading one tensor at a time."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.checkpoint.directory import GENERATION_CONFIG, read_config, read_json, read_tensors
from delivery.checkpoint.header import Region, TensorInfo
from delivery.checkpoint.layouts import family_of
from delivery.checkpoint.outline import quantization_of
from delivery.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import torch

    from delivery.checkpoint.tokenizer import Tokenizer
    from delivery.qtensor import QTensor


_PLAIN = ("F16", "BF16", "F32", "F64")
"""Dtypes of weights that are what they say."""


class Checkpoint:
    """A model directory whose config, index and headers have been checked; no weight is read by `open`."""

    def __init__(self, path: Path, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> None:
        self.path = path
        self.config = config
        self._tensors = tensors

    @classmethod
    def open(cls, path: Path | str, config: Mapping[str, Any] | None = None) -> Checkpoint:
        """Open a directory; `config` replaces its config.json and is not checked.

        Raises DataError `no-architecture` or `unknown-architecture` before weights are looked at, and
        what `read_config` and `read_tensors` raise.
        """
        directory = Path(path)
        if config is None:
            config = read_config(directory)
            family_of(config)
        return cls(directory, dict(config), read_tensors(directory))

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`, {} where there is none."""
        return read_json(self.path / GENERATION_CONFIG)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The config's `quantization_config` (or that of its language tower); None for plain weights."""
        return quantization_of(self.config)

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the order of their data."""
        return tuple(self._tensors)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def info(self, name: str) -> TensorInfo:
        """Raises DataError `tensor-missing`."""
        if name not in self._tensors:
            raise DataError(
                "tensor-missing",
                f"{self.path} has no tensor {name!r}",
                why=f"it holds {len(self._tensors)} tensors",
                hint=did_you_mean(name, self._tensors) if self._tensors else "",
            )
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises as `info`."""
        return self.info(name).shape

    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.size_bytes for info in self._tensors.values())

    def tensor(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """One tensor, on the CPU backed by a private mapping of its file that lives as long as it does.

        Pages are read when touched and dropped with the tensor; writing to it never reaches the file.
        """
        import torch

        info = self.info(name)
        dtype = torch_dtype(info.dtype)
        if info.size_bytes == 0:
            return torch.empty(info.shape, dtype=dtype, device=device)
        start = info.offset - info.offset % mmap.ALLOCATIONGRANULARITY
        with (self.path / info.shard).open("rb") as stream:
            view = mmap.mmap(
                stream.fileno(),
                info.offset - start + info.size_bytes,
                access=mmap.ACCESS_COPY,
                offset=start,
            )
        inner = info.offset - start
        if inner % dtype.itemsize:
            raw = torch.frombuffer(view, dtype=torch.uint8, count=info.size_bytes, offset=inner).clone()
            return raw.view(dtype).reshape(info.shape).to(device)
        flat = torch.frombuffer(view, dtype=dtype, count=info.count, offset=inner)
        return flat.reshape(info.shape).to(device)

    def region(self, name: str) -> Region:
        """Where the bytes of a tensor lie. Raises as `info`."""
        info = self.info(name)
        return Region(self.path / info.shard, info.offset, info.size_bytes)

    def weight(self, prefix: str, device: torch.device | str = "cpu") -> torch.Tensor | QTensor:
        """The weight of a linear layer or embedding: `prefix.weight` as it is, or a QTensor where quantised.

        prefix: such as "model.layers.0.self_attn.q_proj". Raises as `info` and as the format's `unpack`,
        DataError `quantization-variant`, `quantised-tensor-missing`.
        """
        from delivery.formats import format_of

        if self.quantization is not None:
            reader = format_of(self.quantization)
            if reader.is_quantized(prefix, self.has, self.quantization):
                try:
                    qtensor: QTensor = reader.unpack(prefix, self.tensor, self.has, self.quantization)
                except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                    raise DataError(
                        "quantization-variant",
                        f"the quantization_config of {self.path} cannot be read",
                        why=f"for {prefix} it says something of the wrong kind: {error!r}",
                        hint="take config.json and the weights from the same revision of the model",
                    ) from error
                return qtensor if str(device) == "cpu" else qtensor.to(device)
        if self.info(f"{prefix}.weight").dtype not in _PLAIN:
            raise DataError(
                "quantised-tensor-missing",
                f"the scales of {prefix}.weight are missing",
                why=f"it is stored as {self.info(f'{prefix}.weight').dtype}, which means nothing alone",
                hint="get the checkpoint again, or quantise it again",
            )
        return self.tensor(f"{prefix}.weight", device)

    def tokenizer(self) -> Tokenizer:
        from delivery.checkpoint.tokenizer import Tokenizer

        return Tokenizer.open(self.path)


@cache
def _dtypes() -> dict[str, torch.dtype]:
    import torch

    return {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I16": torch.int16,
        "U16": torch.uint16,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I32": torch.int32,
        "U32": torch.uint32,
        "F32": torch.float32,
        "I64": torch.int64,
        "U64": torch.uint64,
        "F64": torch.float64,
        "C64": torch.complex64,
    }


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name. Raises DataError `dtype-unsupported`."""
    if name not in _dtypes():
        raise DataError("dtype-unsupported", f"tensors of dtype {name} cannot be read")
    return _dtypes()[name]


def safetensors_dtype(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype. Raises DataError `dtype-unsupported`."""
    for name, known in _dtypes().items():
        if known == dtype:
            return name
    raise DataError("dtype-unsupported", f"tensors of dtype {dtype} cannot be written")
