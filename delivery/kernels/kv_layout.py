"""Layouts of the paged KV cache: plain, int8, fp8 and int4 with scales per token and head.

Values:  [num_blocks, block_size, num_kv_heads, stored_dim]; in memory a quantised cache has the heads
         outside the tokens of a block, because a head's share of a token is only 64 or 128 bytes, and
         reads that short leave half of the memory's bandwidth unused
Scales:  float32 [num_blocks, num_kv_heads, parts, block_size], so that one head of one block is
         contiguous; parts = 1 (scale), or 2 for int4 (scale, minimum).

int8 and fp8 are symmetric: x = q · scale. int4 is affine, x = q · scale + minimum with q in 0 .. 15,
because keys have channels of one sign (KIVI, arXiv 2402.02750); two features share a byte: feature j
in the low nibble and feature j + head_dim / 2 in the high one, so that a kernel multiplies halves of
a head without interleaving them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from delivery.errors import UsageError, did_you_mean
from delivery.kernels.row_quant import TINY, quantize_rows


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One layout. `dtype` None stores the model's own dtype, without scales (`parts` = 0)."""

    name: str
    dtype: torch.dtype | None
    parts: int

    def stored_dim(self, head_dim: int) -> int:
        """Elements of the value tensor that one token of one head takes."""
        return head_dim // 2 if self.name == "int4" else head_dim

    def token_head_bytes(self, head_dim: int, model_dtype: torch.dtype) -> int:
        """Bytes that the key (or the value) of one token and one head takes, its scales included."""
        return self.stored_dim(head_dim) * (self.dtype or model_dtype).itemsize + 4 * self.parts

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        model_dtype: torch.dtype,
        device: torch.device | str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(values, scales or None), zeroed: what a kernel may read beyond a sequence's end is finite."""
        stored_dim = self.stored_dim(head_dim)
        if self.dtype is None:
            shape = (num_blocks, block_size, num_kv_heads, stored_dim)
            return torch.zeros(shape, dtype=model_dtype, device=device), None
        by_head = (num_blocks, num_kv_heads, block_size, stored_dim)
        values = torch.zeros(by_head, dtype=self.dtype, device=device).transpose(1, 2)
        scales = (num_blocks, num_kv_heads, self.parts, block_size)
        return values, torch.zeros(scales, dtype=torch.float32, device=device)

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [T, heads, head_dim] → (values [T, heads, stored_dim], scales [T, heads, parts] or None)."""
        return _QUANTIZE[self.name](x)

    def dequantize(self, values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """The inverse of `quantize`, in float32, or in float64 where the scales or values are."""
        return _DEQUANTIZE[self.name](values, scales)


def _plain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    return x, None


def _quantize_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = wide.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=TINY)
    q = ((wide - low) / scale).round().clamp(0, 15).to(torch.uint8)
    first, second = q.chunk(2, dim=-1)
    return first | (second << 4), torch.cat((scale, low), dim=-1)


def _dequantize_plain(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _dequantize_symmetric(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    assert scales is not None
    return values.to(scales.dtype) * scales


def _dequantize_int4(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    assert scales is not None
    q = torch.cat((values & 15, values >> 4), dim=-1)
    return q.to(scales.dtype) * scales[..., :1] + scales[..., 1:]


_QUANTIZE: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]] = {
    "auto": _plain,
    "int8": lambda x: quantize_rows(x, torch.int8),
    "fp8": lambda x: quantize_rows(x, torch.float8_e4m3fn),
    "int4": _quantize_int4,
}
_DEQUANTIZE: dict[str, Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]] = {
    "auto": _dequantize_plain,
    "int8": _dequantize_symmetric,
    "fp8": _dequantize_symmetric,
    "int4": _dequantize_int4,
}

LAYOUTS = {
    layout.name: layout
    for layout in (
        KVLayout("auto", None, 0),
        KVLayout("int8", torch.int8, 1),
        KVLayout("fp8", torch.float8_e4m3fn, 1),
        KVLayout("int4", torch.uint8, 2),
    )
}


def kv_layout(name: str) -> KVLayout:
    """The layout called 'auto' (the model's dtype), 'int8', 'fp8' or 'int4'; UsageError otherwise."""
    if name not in LAYOUTS:
        raise UsageError(
            "unknown-kv-dtype", f"unknown KV cache dtype {name!r}", hint=did_you_mean(name, LAYOUTS)
        )
    return LAYOUTS[name]


def layout_of(cache: torch.Tensor) -> KVLayout:
    """The layout of a value tensor, identified by its dtype."""
    return next((layout for layout in LAYOUTS.values() if layout.dtype == cache.dtype), LAYOUTS["auto"])


def gather(
    cache: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values [S, heads, stored_dim] and scales [S, heads, parts] at slots int64 [S]."""
    block, offset = slots // cache.shape[1], slots % cache.shape[1]
    return cache[block, offset], None if scales is None else scales[block, :, :, offset]


def scatter(
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    slots: torch.Tensor,
    values: torch.Tensor,
    value_scales: torch.Tensor | None,
) -> None:
    """Writes at slots int64 [S] what `quantize` returned; the inverse of `gather`."""
    block, offset = slots // cache.shape[1], slots % cache.shape[1]
    cache[block, offset] = values.to(cache.dtype)
    if scales is not None and value_scales is not None:
        scales[block, :, :, offset] = value_scales.to(scales.dtype)
