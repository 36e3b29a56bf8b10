"""8-bit weights as kernels take them: the matrix as it is, scales in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from delivery.errors import DataError
from delivery.qtensor import QTensor

DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
BLOCK = 128


@dataclass(frozen=True, slots=True)
class PackedW8:
    """An 8-bit weight [N, K] ready for `linear_w8a8` and `linear_w8a16`.

    weight: int8 or float8 [N, K], rows contiguous. scale: float32 [N, 1], or [ceil(N/128), ceil(K/128)]
    when `blocks`. input_scale: float32 [1], the fixed scale of activations; None quantises each row of x.
    resident: False when the weight is rewritten between calls (streamed); see PackedW4.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    blocks: bool = False
    input_scale: torch.Tensor | None = None
    resident: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def size_bytes(self) -> int:
        """Bytes on the device."""
        return sum(t.numel() * t.element_size() for t in (self.weight, self.scale))

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in `dtype`; the product is formed in float32, in float64 if asked for."""
        group = BLOCK if self.blocks else -1
        scale = self.scale.double() if dtype == torch.float64 else self.scale
        whole = QTensor(self.weight, scale, None, group, 8, block_size=BLOCK if self.blocks else None)
        return whole.dequantize(dtype)


def why_not_pack(weight: QTensor) -> str | None:
    """Why `pack` cannot take a weight."""
    if weight.qdata.dtype not in DTYPES or weight.bits != 8:
        return f"expected int8 or float8, got {weight.bits} bits in {weight.qdata.dtype}"
    if weight.zero_point is not None:
        return "8-bit weights are symmetric here"
    if weight.block_size not in (None, BLOCK):
        return f"expected blocks of {BLOCK}, got {weight.block_size}"
    if weight.block_size is not None and weight.qdata.dtype == torch.int8:
        return "128-block scales belong to fp8 weights"
    if weight.block_size is None and weight.scale.shape[1] != 1:
        return "expected one scale per output channel or per tensor, got groups"
    if weight.outliers is not None:
        return "outliers are kept apart, which no kernel reads"
    return None


def pack(weight: QTensor) -> PackedW8:
    """The packed form of an 8-bit QTensor. Raises DataError `unsupported-weight`."""
    if reason := why_not_pack(weight):
        raise DataError("unsupported-weight", "this weight has no packed 8-bit form", why=reason)
    scale = weight.scale.float()
    if weight.block_size is None:
        scale = scale.expand(weight.shape[0], 1)
    fixed = None if weight.input_scale is None else weight.input_scale.float().reshape(1)
    return PackedW8(weight.qdata.contiguous(), scale.contiguous(), weight.block_size is not None, fixed)
