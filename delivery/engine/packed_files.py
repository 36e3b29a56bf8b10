"""Packed layers on disk: frozen dataclasses of tensors and plain values, as JSON and named tensors.

Whatever form a kernel wants its weight in is a dataclass; this is the one way in which all of them are
stored, so a new form needs no code here. Only classes of this package are made when reading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch

from delivery.artifact import Json
from delivery.errors import DataError

_ROOMS = ("delivery.kernels.", "delivery.engine.", "delivery.model.")


class Packer:
    """Collects tensors under names while values become JSON; a tensor met twice is stored once."""

    def __init__(self, add: Callable[[str, torch.Tensor], None]) -> None:
        self._add = add
        self._names: dict[tuple[int, torch.Size, torch.dtype], str] = {}
        # Keeps tensors alive: a freed one's address may come back as another's.
        self._kept: list[torch.Tensor] = []

    def pack(self, value: Any, name: str) -> Json:
        """The JSON form of a value; tensors in it are added under names that begin with `name`."""
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, name)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, tuple | list):
            return {"tuple": [self.pack(item, f"{name}.{i}") for i, item in enumerate(value)]}
        if isinstance(value, Mapping):
            pairs = [[self.pack(k, name), self.pack(v, f"{name}.{_key(k)}")] for k, v in value.items()]
            return {"map": pairs}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {
                f.name: self.pack(getattr(value, f.name), f"{name}.{f.name}")
                for f in dataclasses.fields(value)
            }
            return {"class": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
        raise TypeError(f"{name}: a {type(value).__name__} cannot be stored in an engine directory")

    def _tensor(self, tensor: torch.Tensor, name: str) -> str:
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        if key not in self._names or tensor.numel() == 0:
            self._add(name, tensor)
            self._names[key] = name
            self._kept.append(tensor)
        return self._names[key]


def unpack(value: Json, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of `Packer.pack`. Raises DataError `engine-damaged`."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensor(value["tensor"])
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    if "tuple" in value:
        return tuple(unpack(item, tensor) for item in value["tuple"])
    if "map" in value:
        return {unpack(k, tensor): unpack(v, tensor) for k, v in value["map"]}
    cls = _class(value.get("class", ""))
    return cls(**{name: unpack(item, tensor) for name, item in value["fields"].items()})


def tensor_names(value: Json) -> Iterator[str]:
    """The tensors that a packed value names, in order; one may come several times."""
    if isinstance(value, dict):
        if isinstance(value.get("tensor"), str):
            yield value["tensor"]
            return
        for inner in value.values():
            yield from tensor_names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from tensor_names(inner)


def _class(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        if not module.startswith(_ROOMS):
            raise ImportError(f"{path!r} is not a class of this package")
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DataError(
            "engine-damaged",
            "the engine directory names a layer form that this version does not have",
            why=str(error),
            hint="deliver build",
        ) from error
    if not dataclasses.is_dataclass(found):
        raise DataError("engine-damaged", f"{path} is not a layer form", hint="deliver build")
    return found


def _key(key: object) -> str:
    return "+".join(key) if isinstance(key, tuple) else str(key)
