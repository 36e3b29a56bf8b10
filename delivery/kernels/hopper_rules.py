"""When the Hopper kernels can run, and the tile they take where nothing was measured."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from delivery.kernels.targets import multiprocessors
from delivery.kernels.tuning import Tile


def why_not_hopper(x: torch.Tensor, *others: torch.Tensor) -> str | None:
    """Why the bulk-copy kernels cannot take operands [rows, K], of which x is the activation."""
    if x.device.type != "cuda":
        return f"the tensor is on {x.device}"
    if reason := _why_not_device(x.device.index or 0):
        return reason
    if x.shape[0] == 0:
        return "there are no rows"
    for operand in (x, *others):
        row_bytes = operand.stride(0) * operand.element_size()
        if operand.stride(1) != 1 or row_bytes % 16 or operand.data_ptr() % 16:
            return "rows are not contiguous and aligned to 16 bytes"
    return None


@cache
def _why_not_device(index: int) -> str | None:
    major, minor = torch.cuda.get_device_capability(index)
    if major != 9:
        return f"compute capability {major}.{minor} is not 9.x"
    if find_spec("triton") is None or find_spec("triton.experimental.gluon") is None:
        return "this triton has no Gluon (needs triton 3.6 or newer)"
    try:
        import delivery.kernels.gpu.stream_hopper
        import delivery.kernels.gpu.w4_hopper  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"this triton's Gluon differs from the one these kernels know: {error}"
    return None


def rule(n: int, k_steps: int, rows: int, device: torch.device, *, four_bit: bool = False) -> Tile:
    """A tile for a weight of n output features whose K is `k_steps` steps of the ring.

    Few rows: narrow tiles, K split until the programs that run at once are all in use. Many rows: the
    largest accumulator that the registers hold, unless that leaves multiprocessors idle. The numbers are
    what the shapes of an 8B model preferred on an H200 (docs/performance/linear.md).
    """
    sms = multiprocessors(device)
    if rows <= 16:
        block_m = 8 if rows <= 8 else 16
        at_once = sms * (4 if four_bit else 3)
        splits = _splits(at_once, -(-n // 64), k_steps)
        return Tile(64, block_m, 4, 4 if four_bit else 8, splits)
    if rows <= 64:
        block_m = 32 if rows <= 32 else 64
        if n >= 128 * sms:
            return Tile(128, block_m, 8, 4 if four_bit else 8, 1, four_bit)
        splits = min(2, _splits(sms, -(-n // 64), k_steps))
        return Tile(64, block_m, 4, 6 if four_bit else 8, splits, four_bit)
    block_m = 256 if four_bit and rows > 128 else 128
    row_tiles = -(-rows // block_m)
    wide_n = 128 if four_bit else 256
    if -(-n // wide_n) * row_tiles >= sms * 3 // 4:
        return Tile(wide_n, block_m, 8, 3 if four_bit else 4, 1, four_bit)
    splits = min(4, _splits(sms, -(-n // 64) * row_tiles, k_steps))
    return Tile(64, block_m, 4, 3 if four_bit else 4, splits, four_bit)


def _splits(at_once: int, tiles: int, k_steps: int) -> int:
    """Programs that share K, so that about `at_once` run, each with four steps or more."""
    return max(1, min(8, at_once // tiles, k_steps // 4))
