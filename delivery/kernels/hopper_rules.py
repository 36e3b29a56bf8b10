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

    Few rows: narrow tiles, K split until every multiprocessor has several programs, which hides latency.
    Many rows: the largest accumulator that the registers hold.
    """
    block_m = next((b for b in (8, 16, 32, 64, 128) if rows <= b), 256 if four_bit else 128)
    if rows <= 32:
        block_n, warps, stages = 64, 4, 6
    elif rows <= 64:
        block_n, warps, stages = 128, 8, 5
    else:
        block_n, warps, stages = 128, 8, 3 if block_m == 256 else 4
    tiles = -(-n // block_n) * -(-rows // block_m)
    wanted = multiprocessors(device) * (3 if warps == 4 else 1)
    splits = max(1, min(8, round(wanted / tiles), k_steps // 4))
    return Tile(block_n, block_m, warps, stages, splits, four_bit and rows > 32)
