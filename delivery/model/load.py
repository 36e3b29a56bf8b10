"""Reading a model: its config, one block's weights at a time, and its two ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from delivery.errors import DataError
from delivery.model.config import ModelConfig
from delivery.model.families import family_for, family_named
from delivery.model.families.family import Part
from delivery.model.shapes import linear_shape, norm_shape, shape_disagrees, vocabulary_disagrees
from delivery.model.stored import Names, find_root, holds, stored_part
from delivery.model.weights import BlockWeights, Linear, Norm
from delivery.qtensor import Outliers, QTensor


class WeightSource(Names, Protocol):
    """Where weights come from; `delivery.checkpoint.Checkpoint` is one, `StateDict` another."""

    def tensor(self, name: str, device: Any = "cpu") -> torch.Tensor: ...

    def weight(self, prefix: str, device: Any = "cpu") -> torch.Tensor | QTensor: ...


class StateDict:
    """A WeightSource over tensors in memory, float or QTensor (under `prefix + ".weight"`)."""

    def __init__(self, tensors: Mapping[str, torch.Tensor | QTensor]) -> None:
        self._tensors = tensors

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str, device: Any = "cpu") -> torch.Tensor:
        found = self._tensors[name]
        assert isinstance(found, torch.Tensor)
        return found.to(device)

    def weight(self, prefix: str, device: Any = "cpu") -> torch.Tensor | QTensor:
        return self._tensors[f"{prefix}.weight"].to(device)


@dataclass(frozen=True, slots=True)
class Ends:
    """Embedding, final norm and head. table: [vocabulary, H]; head: Linear, tied or not."""

    table: torch.Tensor
    norm: Norm
    head: Linear
    tied: bool


def load_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig.

    Raises DataError `no-architecture`, `unknown-architecture` or `config-invalid`.
    """
    return family_for(hf_config).config(hf_config)


def load_block(
    source: WeightSource,
    config: ModelConfig,
    layer: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> BlockWeights:
    """The weights of decoder block `layer`, and of no other.

    dtype: of float weights; None keeps them as stored. QTensors stay as they are.
    Raises DataError `missing-weight` with the name of the tensor that the file lacks, and
    `shape-disagrees` for one whose shape does not follow from the config.
    """
    family = family_named(config.family)
    root = find_root(source, family)
    reader = _Reader(source, root, device, dtype)
    return BlockWeights(
        linears={
            name: reader.linear(stored_part(source, root, part), linear_shape(config, name))
            for name, part in family.linears(config, layer).items()
        },
        norms={
            name: reader.norm(f"{root}.{stored}", config, norm_shape(config, name))
            for name, stored in family.norms(config, layer).items()
        },
        tensors={
            name: reader.tensor(f"{root}.{stored}") for name, stored in family.tensors(config, layer).items()
        },
    )


def load_ends(
    source: WeightSource,
    config: ModelConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Ends:
    """Embedding table, final norm and head. Whether the head is tied is decided by what is stored."""
    family = family_named(config.family)
    root = find_root(source, family)
    reader = _Reader(source, root, device, dtype)
    table = reader.weight(f"{root}.{family.embed}")
    if table.shape[0] < config.vocab_size:
        raise vocabulary_disagrees(f"{root}.{family.embed}.weight", table.shape[0], config.vocab_size)
    norm = reader.norm(f"{root}.{family.norm}", config, (config.hidden_size,))
    stored = next((h for h in family.heads if holds(source, h)), None)
    if stored is None:
        name = f"{root}.{family.embed}"
        return Ends(_float(table, dtype), norm, Linear(name, table), tied=True)
    head, bias = reader.weight(stored), reader.bias(stored)
    if head.shape[0] < config.vocab_size:
        raise vocabulary_disagrees(f"{stored}.weight", head.shape[0], config.vocab_size)
    return Ends(_float(table, dtype), norm, Linear(stored, head, bias), tied=False)


def _float(weight: torch.Tensor | QTensor, dtype: torch.dtype | None) -> torch.Tensor:
    return weight.dequantize(dtype or torch.float32) if isinstance(weight, QTensor) else weight


@dataclass(slots=True)
class _Reader:
    source: WeightSource
    root: str
    device: torch.device | str
    dtype: torch.dtype | None
    # A fused tensor is read once for all of its parts.
    read: dict[str, torch.Tensor | QTensor] = field(default_factory=dict)

    def linear(self, part: Part, shape: tuple[int, int] | None) -> Linear:
        prefix = f"{self.root}.{part.prefix}"
        if part.expert is not None:
            weight: torch.Tensor | QTensor = self.of_stack(prefix, part.expert, part.transposed)
        else:
            weight = self.weight(prefix)
        bias = None if part.expert is not None else self.bias(prefix)
        rows = None
        if part.rows is not None:
            rows = torch.cat([torch.arange(r.start, r.stop, r.step) for r in part.rows])
            weight = take_rows(weight, rows.to(self.device))
            bias = None if bias is None else bias[rows.to(self.device)]
        if shape is not None and tuple(weight.shape) != shape:
            raise shape_disagrees(f"{prefix}.weight", tuple(weight.shape), shape)
        return Linear(prefix, weight, bias, rows, part.expert)

    def weight(self, prefix: str) -> torch.Tensor | QTensor:
        if prefix not in self.read:
            if not holds(self.source, prefix):
                raise _missing(f"{prefix}.weight")
            weight = self.source.weight(prefix, self.device)
            cast = isinstance(weight, torch.Tensor) and self.dtype is not None
            self.read[prefix] = weight.to(self.dtype) if cast else weight  # type: ignore[arg-type]
        return self.read[prefix]

    def of_stack(self, name: str, expert: int, transposed: bool) -> torch.Tensor:
        if name not in self.read:
            if not self.source.has(name):
                raise _missing(name)
            self.read[name] = self.source.tensor(name, self.device)
        stack = self.read[name]
        assert isinstance(stack, torch.Tensor)
        one = stack[expert].T.contiguous() if transposed else stack[expert]
        return one if self.dtype is None else one.to(self.dtype)

    def bias(self, prefix: str) -> torch.Tensor | None:
        return self.tensor(f"{prefix}.bias") if self.source.has(f"{prefix}.bias") else None

    def tensor(self, name: str) -> torch.Tensor:
        if not self.source.has(name):
            raise _missing(name)
        tensor = self.source.tensor(name, self.device)
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def norm(self, name: str, config: ModelConfig, shape: tuple[int] | None) -> Norm:
        weight = self.tensor(name)
        if shape is not None and tuple(weight.shape) != shape:
            raise shape_disagrees(name, tuple(weight.shape), shape)
        return Norm(name, weight, config.rms_eps, config.norm_plus_one)


def take_rows(weight: torch.Tensor | QTensor, rows: torch.Tensor) -> torch.Tensor | QTensor:
    """Some rows (output features) of a weight, int64 [n]. 128-block scales become 128-group scales."""
    if isinstance(weight, torch.Tensor):
        return weight[rows]
    scale, group_size = weight.scale, weight.group_size
    if weight.block_size is not None:
        scale = scale.repeat_interleave(weight.block_size, 0)[: weight.shape[0]]
        group_size = weight.block_size
    per_row = scale.shape[0] > 1
    zero_point = weight.zero_point
    return QTensor(
        qdata=weight.qdata[rows],
        scale=scale[rows] if per_row else scale,
        zero_point=zero_point[rows] if zero_point is not None and per_row else zero_point,
        group_size=group_size,
        bits=weight.bits,
        g_idx=weight.g_idx,
        input_scale=weight.input_scale,
        act_dtype=weight.act_dtype,
        outliers=None if weight.outliers is None else _take_outliers(weight.outliers, rows, weight.shape),
    )


def _take_outliers(outliers: Outliers, rows: torch.Tensor, shape: tuple[int, int]) -> Outliers:
    place = torch.full((shape[0],), -1, dtype=torch.int64, device=outliers.index.device)
    place[rows] = torch.arange(len(rows), device=place.device)
    row, column = outliers.index // shape[1], outliers.index % shape[1]
    kept = place[row] >= 0
    index, order = (place[row][kept] * shape[1] + column[kept]).sort()
    return Outliers(index, outliers.values[kept][order], outliers.scale[rows], outliers.bits)


def _missing(name: str) -> DataError:
    return DataError(
        "missing-weight",
        f"the checkpoint has no tensor {name}",
        why="the architecture that its config states needs it",
        hint="deliver inspect on the checkpoint; is its `architectures` right?",
    )
