"""Scheme: the interface of a file under `schemes/`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

import torch

from delivery.errors import UsageError, did_you_mean
from delivery.qtensor import Outliers, QTensor
from delivery.quantization.schemes import scheme_names

if TYPE_CHECKING:
    from delivery.quantization.options import Options
    from delivery.quantization.work import BlockWork

Granularity = Literal["group", "channel", "tensor", "block"]
Need = Literal["absmax", "gram", "sample", "sensitivity"]
"""What a scheme wants to know: maxima per input channel, the Gram matrix of the inputs, some tokens, and
how much each output feature matters to the block."""


@dataclass(frozen=True, slots=True)
class Storage:
    """What a scheme's weights look like when stored.

    weight: dtype of the elements (uint8 and int8 hold values of `bits` bits). activation: dtype that
    inputs are quantised to, None for none; `static`: with a scale fixed beforehand.
    """

    bits: int
    weight: torch.dtype
    granularity: Granularity
    activation: torch.dtype | None = None
    static: bool = False

    def prototype(
        self,
        shape: tuple[int, int],
        group_size: int,
        symmetric: bool,
        *,
        outliers: bool = False,
        reordered: bool = False,
    ) -> QTensor:
        """A QTensor without data (on the meta device) of the form that the scheme makes.

        reordered: groups are formed along another order than the stored one, so there is a g_idx.
        """
        rows, columns = shape
        width = columns if group_size == -1 else group_size
        scales = {
            "group": (rows, columns // width),
            "channel": (rows, 1),
            "tensor": (1, 1),
            "block": (-(-rows // 128), -(-columns // 128)),
        }[self.granularity]
        grouped = self.granularity == "group"
        asymmetric = grouped and not symmetric
        weight = torch.uint8 if asymmetric else self.weight

        def empty(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device="meta")

        apart = None
        if grouped and outliers:
            apart = Outliers(empty((1,), torch.int64), empty((1,), torch.int8), empty((rows,), torch.float16))
        return QTensor(
            qdata=empty(shape, weight),
            scale=empty(scales, torch.float16 if grouped else torch.float32),
            zero_point=empty(scales, torch.uint8) if asymmetric else None,
            group_size=group_size if grouped else -1,
            bits=self.bits,
            g_idx=empty((columns,), torch.int32) if grouped and reordered and group_size != -1 else None,
            input_scale=empty((1,), torch.float32) if self.static else None,
            act_dtype=self.activation,
            block_size=128 if self.granularity == "block" else None,
            outliers=apart,
        )


W4 = Storage(4, torch.int8, "group")


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to quantise the linear layers of a block.

    needs: what must be known of the activations, given the options; empty for data-free schemes.
    quantize: works on a `BlockWork` in place: moves scales where it wants, then finishes every layer.
    formats: on-disk formats that can hold the result, the default first.
    compensates: whether rounding errors are compensated in later columns, given the options.
    """

    name: str
    summary: str
    storage: Storage
    needs: Callable[[Options], frozenset[Need]]
    quantize: Callable[[BlockWork], None]
    formats: tuple[str, ...] = ("compressed-tensors",)
    compensates: Callable[[Options], bool] = lambda _options: False

    def prototype(self, shape: tuple[int, int], group_size: int, options: Options) -> QTensor:
        """A QTensor without data (on the meta device) of the form that the scheme makes of a layer."""
        compensates = self.compensates(options)
        return self.storage.prototype(
            shape,
            group_size,
            options.symmetric,
            outliers=bool(options.outliers) and not compensates,
            reordered=compensates and options.act_order == "group",
        )

    @property
    def grouped(self) -> bool:
        return self.storage.granularity == "group"


def load_scheme(name: str) -> Scheme:
    """The scheme called `name`. Raises UsageError `unknown-scheme`."""
    if name not in scheme_names():
        raise UsageError(
            "unknown-scheme", f"there is no scheme {name!r}", hint=did_you_mean(name, scheme_names())
        )
    module = import_module(f"delivery.quantization.schemes.{name.replace('-', '_')}")
    scheme = module.SCHEME
    assert isinstance(scheme, Scheme)
    assert scheme.name == name
    return scheme


def as_asked(options: Options) -> bool:
    """`compensates` of a scheme that leaves the rounding to the options."""
    return options.rounding == "gptq"


def nothing(_options: Options) -> frozenset[Need]:
    """`needs` of a scheme that looks at the weights alone."""
    return frozenset()
