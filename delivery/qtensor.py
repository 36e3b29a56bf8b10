"""QTensor: the one in-memory form of a quantised weight.

On-disk layouts are `pack`/`unpack` pairs around it (`formats/`), kernels pack it into their own
layout, and quantisers return it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class Outliers:
    """A few weights kept apart from the grid of the others.

    index: int64 [M], row · K + column, ascending. values: int8 [M]. scale: float [N], by which the values
    of a row are multiplied. bits: significant bits of a value (6: −32 .. 31).
    """

    index: torch.Tensor
    values: torch.Tensor
    scale: torch.Tensor
    bits: int = 6

    def to(self, device: torch.device | str) -> Outliers:
        """The same on another device."""
        return Outliers(self.index.to(device), self.values.to(device), self.scale.to(device), self.bits)

    def put_into(self, weight: torch.Tensor) -> None:
        """Write the outliers into a dequantised weight [N, K], in place."""
        rows = self.index // weight.shape[1]
        kept = self.values.to(weight.dtype) * self.scale.to(weight.dtype)[rows]
        weight.view(-1)[self.index] = kept


@dataclass(frozen=True, slots=True)
class QTensor:
    """A weight [N, K] (N output features, K input features) in low precision.

    qdata: [N, K]; one value per element, never packed. uint8 with values 0 .. 2^bits − 1 when
        there is a zero point; int8 with values −2^(bits−1) .. 2^(bits−1) − 1 when symmetric;
        float8_e4m3fn or float8_e5m2 for FP8.
    scale: float, one of [N, K/g] (grouped), [N, 1] (per channel), [1, 1] (per tensor), or
        [ceil(N/128), ceil(K/128)] (128-block, `block_size` = 128).
    zero_point: uint8, of the shape of `scale`; None when symmetric.
    group_size: input features per scale; −1 for one group over all of K.
    g_idx: int32 [K], the group of each input feature (GPTQ act-order); None for k // group_size.
    bits: bits per element as stored (4, 8, ...).
    input_scale: float [1], static activation scale (FP8 static); None when dynamic or unquantised.
    act_dtype: dtype that activations are quantised to before the product (W8A8), or None when they
        stay in floating point.
    block_size: 128 for 128 x 128 block scales, else None.
    outliers: weights stored apart, which replace their values on the grid; or None.

    w[n, k] = (qdata[n, k] − zero_point[n, g]) · scale[n, g], in the dtype of `scale`.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    group_size: int
    bits: int
    g_idx: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    act_dtype: torch.dtype | None = None
    block_size: int | None = None
    outliers: Outliers | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.qdata.shape[0], self.qdata.shape[1]

    def to(self, device: torch.device | str) -> QTensor:
        """The same tensor on another device."""

        def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device)

        return QTensor(
            qdata=self.qdata.to(device),
            scale=self.scale.to(device),
            zero_point=move(self.zero_point),
            group_size=self.group_size,
            bits=self.bits,
            g_idx=move(self.g_idx),
            input_scale=move(self.input_scale),
            act_dtype=self.act_dtype,
            block_size=self.block_size,
            outliers=None if self.outliers is None else self.outliers.to(device),
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [N, K] in `dtype`; the product is formed in float32 (float64 if asked for)."""
        work = torch.float64 if dtype == torch.float64 else torch.float32
        rows, columns = self.shape
        scale = self.scale.to(work)
        values = self.qdata.to(work)
        if self.block_size is not None:
            scale = scale.repeat_interleave(self.block_size, 0)[:rows]
            scale = scale.repeat_interleave(self.block_size, 1)[:, :columns]
            return (values * scale).to(dtype)
        groups = self.group_index()
        if self.zero_point is not None:
            zero_point = self.zero_point.to(work)
            values = values - (zero_point if zero_point.shape[1] == 1 else zero_point[:, groups])
        values = values * (scale if scale.shape[1] == 1 else scale[:, groups])
        if self.outliers is not None:
            self.outliers.put_into(values)
        return values.to(dtype)

    def group_index(self) -> torch.Tensor:
        """int64 [K]: the column of `scale` that each input feature uses."""
        columns = self.shape[1]
        if self.g_idx is not None:
            return self.g_idx.to(torch.int64)
        if self.group_size == -1:
            return torch.zeros(columns, dtype=torch.int64, device=self.qdata.device)
        return torch.arange(columns, device=self.qdata.device) // self.group_size

    def bits_per_weight(self) -> float:
        """Stored bits over elements, scales and zero points counted at their stored widths."""
        stored = self.qdata.numel() * self.bits + self.scale.numel() * self.scale.element_size() * 8
        if self.zero_point is not None:
            stored += self.zero_point.numel() * self.bits
        if self.outliers is not None:
            o = self.outliers
            stored += o.index.numel() * (o.bits + 64) + o.scale.numel() * o.scale.element_size() * 8
        return stored / self.qdata.numel()
