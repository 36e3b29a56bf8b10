"""The one packed layout of a 4-bit weight, read by every kernel for every number of rows.

A tile is 256 output features x 128 input features, 16 KiB of int32 words [128, 32], tiles of one row
block lie behind each other along K. Inside a tile, bits of the feature numbers go

    word row     n7 n6 n5 n4 k6 n2 n1        word column  n0 k2 k1 k5 k4        nibble  k0 k3 n3

so that 16 consecutive bytes hold what one thread feeds to the tensor cores (PTX `mma` m16k16, operand
A) for 64 input features: a warp reads 512 consecutive bytes, and nothing moves between threads. The
nibble order puts the two halves of every 16-bit pair 16 bits apart, where one `lop3` takes both.
The idea is that of Marlin (Frantar et al. 2024, arXiv:2408.11743); the layout is our own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from delivery.errors import DataError
from delivery.qtensor import QTensor

TILE_N = 256
TILE_K = 128
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class PackedW4:
    """A 4-bit weight [N, K] ready for `linear_w4a16`.

    words: int32 [ceil(N/256), ceil(K/128), 128, 32]. scale: float [ceil(K/128) · 128/g, N'] with N' = N
    rounded up to 256, zero beyond the weight. zero_point: uint8 of the same shape; None means 8.
    group_size: 32, 64 or 128 (a larger one is repeated). order: int64 [K], the input features in the
    order of their groups (GPTQ act-order): x[:, order] is what the words multiply; None when sorted.
    resident: the words stay as they are while kernels run, so a kernel may read them before the one in
    front of it has ended; False when they are rewritten between calls (streamed weights).
    """

    words: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    group_size: int
    shape: tuple[int, int]
    order: torch.Tensor | None = None
    resident: bool = True

    @property
    def size_bytes(self) -> int:
        """Bytes on the device."""
        parts = [self.words, self.scale, self.zero_point, self.order]
        return sum(p.numel() * p.element_size() for p in parts if p is not None)


def why_not_pack(weight: QTensor) -> str | None:
    """Why `pack` cannot take a weight."""
    if weight.bits != 4 or weight.qdata.dtype not in (torch.uint8, torch.int8):
        return f"expected 4-bit integers, got {weight.bits} bits in {weight.qdata.dtype}"
    if weight.block_size is not None:
        return "128-block scales belong to fp8 weights"
    if weight.group_size != -1 and _common(weight.group_size) is None:
        return f"group size {weight.group_size} is not a multiple of 32"
    if weight.g_idx is not None and _order(weight) is None:
        return "g_idx gives groups of unequal size"
    if weight.outliers is not None:
        return "outliers are kept apart, which no kernel reads"
    return None


def pack(weight: QTensor) -> PackedW4:
    """The packed form of a 4-bit QTensor (int8 −8..7 without, uint8 0..15 with a zero point).

    Raises DataError `unsupported-weight`.
    """
    if reason := why_not_pack(weight):
        raise DataError("unsupported-weight", "this weight has no packed 4-bit form", why=reason)
    n, k = weight.shape
    columns = -(-k // TILE_K) * TILE_K
    rows = -(-n // TILE_N) * TILE_N
    order = None if weight.g_idx is None else _order(weight)
    values = weight.qdata if order is None else weight.qdata[:, order]
    values = values.to(torch.int32) + (0 if weight.qdata.dtype == torch.uint8 else 8)
    values = functional.pad(values & 15, (0, columns - k, 0, rows - n))
    group = TILE_K if weight.group_size == -1 else _common(weight.group_size) or TILE_K
    scale = _per_group(weight.scale, weight.group_size, group, k, rows, columns)
    zero_point = None
    if weight.zero_point is not None:
        zero_point = _per_group(weight.zero_point, weight.group_size, group, k, rows, columns)
    elif weight.qdata.dtype == torch.uint8:
        zero_point = torch.zeros(scale.shape, dtype=torch.uint8, device=scale.device)
    return PackedW4(_words(values), scale, zero_point, group, (n, k), order)


def unpack(packed: PackedW4) -> QTensor:
    """The weight again, grouped by `packed.group_size`, its input features in their own order."""
    n, k = packed.shape
    values = _values(packed.words)[:n, :k].to(torch.uint8)
    groups = -(-k // packed.group_size)
    scale = packed.scale[:groups, :n].t().contiguous()
    if packed.zero_point is None:
        zero_point = torch.full_like(scale, 8, dtype=torch.uint8)
    else:
        zero_point = packed.zero_point[:groups, :n].t().contiguous()
    g_idx = None
    if packed.order is not None:
        place = torch.empty_like(packed.order)
        place[packed.order] = torch.arange(k, device=place.device)
        values, g_idx = values[:, place], (place // packed.group_size).to(torch.int32)
    return QTensor(values, scale, zero_point, packed.group_size, 4, g_idx=g_idx)


def _common(group_size: int) -> int | None:
    """The largest group size a kernel knows that divides `group_size`."""
    return next((g for g in reversed(GROUP_SIZES) if group_size % g == 0), None)


def _order(weight: QTensor) -> torch.Tensor | None:
    """Input features sorted by group, if that gives groups of `group_size` one after the other."""
    groups = weight.group_index()
    order = groups.argsort(stable=True)
    size = weight.shape[1] if weight.group_size == -1 else weight.group_size
    expected = torch.arange(weight.shape[1], device=groups.device) // size
    return order if torch.equal(groups[order], expected) else None


def _per_group(
    values: torch.Tensor, group_size: int, group: int, k: int, rows: int, columns: int
) -> torch.Tensor:
    """[N, K/group_size] → [columns / group, rows], repeated for the smaller group, zero where padded."""
    size = k if group_size == -1 else group_size
    groups = torch.arange(-(-k // group), device=values.device) * group // size
    wide = values[:, groups] if values.shape[1] > 1 else values.expand(-1, len(groups))
    if wide.dtype == torch.float64:
        wide = wide.float()
    padded = functional.pad(wide, (0, columns // group - len(groups), 0, rows - values.shape[0]))
    return padded.t().contiguous()


# Axes after `_values`' and `_words`' reshape: tile, n7..n4, n3, n2 n1, n0 | tile, k6, k5, k4, k3, k2 k1, k0
_SPLIT = (-1, 16, 2, 4, 2)
_SPLIT_K = (-1, 2, 2, 2, 2, 4, 2)
_INTO_WORDS = (0, 5, 1, 6, 3, 4, 10, 7, 8, 11, 9, 2)


def _words(values: torch.Tensor) -> torch.Tensor:
    """int32 [N', K'] of 0..15 → int32 [N'/256, K'/128, 128, 32]."""
    n, k = values.shape
    nibbles = values.reshape(*_shape(n, k)).permute(_INTO_WORDS).reshape(n // TILE_N, k // TILE_K, 128, 32, 8)
    words = torch.zeros(nibbles.shape[:-1], dtype=torch.int32, device=values.device)
    for slot in range(8):
        words |= nibbles[..., slot] << (4 * slot)
    return words


def _values(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `_words`."""
    n, k = words.shape[0] * TILE_N, words.shape[1] * TILE_K
    nibbles = torch.stack([(words >> (4 * slot)) & 15 for slot in range(8)], dim=-1)
    shape = _shape(n, k)
    back = [_INTO_WORDS.index(axis) for axis in range(len(shape))]
    return nibbles.reshape([shape[axis] for axis in _INTO_WORDS]).permute(back).reshape(n, k)


def _shape(n: int, k: int) -> tuple[int, ...]:
    return (n // TILE_N, *_SPLIT[1:], k // TILE_K, *_SPLIT_K[1:])
