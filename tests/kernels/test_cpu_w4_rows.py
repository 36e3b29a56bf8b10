"""4-bit linear layers on a CPU: every number of rows, every group size, both types of scales."""

from __future__ import annotations

import pytest
import torch

from delivery.kernels.cpu.layer import linear
from delivery.kernels.cpu.pack import pack
from delivery.kernels.linear_w4a16 import random_weight

ROWS = (1, 2, 3, 4, 5, 7, 8, 13)


@pytest.mark.parametrize("group_size", [32, 64, 96, 128, 320, -1])
@pytest.mark.parametrize("scale", [torch.float16, torch.float32], ids=str)
def test_rows_are_exact_and_do_not_depend_on_each_other(group_size: int, scale: torch.dtype) -> None:
    k = {96: 384, 320: 640}.get(group_size, 256)
    weight = random_weight(37, k, group_size, zero_point=True, act_order=False, seed=3, scale=scale)
    packed = pack(weight)
    assert packed.form == ("w4_half" if scale == torch.float16 else "w4_float")
    x = torch.randn(max(ROWS), k, generator=torch.Generator().manual_seed(4))
    # Rows of very different size: each has scales of its own.
    x *= torch.logspace(-3, 3, max(ROWS))[:, None]
    exact = weight.dequantize(torch.float64)
    want = x.double() @ exact.t()
    # Rounding to int16 moves an input by half a step: 1/65278 of its group's largest.
    bound = (x.abs().amax(1, keepdim=True).double() / 65278) * exact.abs().sum(1)
    alone = torch.cat([linear(packed, row[None]) for row in x])
    assert ((alone - want).abs() <= bound + 1e-5 * want.abs()).all()
    for rows in ROWS:
        assert torch.equal(linear(packed, x[:rows]), alone[:rows]), rows
