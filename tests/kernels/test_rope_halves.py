"""Rotation of whole heads for prompts: a program takes all heads of a token, where decodes split them."""

from __future__ import annotations

import pytest
import torch

from delivery.kernels import OPS
from delivery.kernels.gpu import rope_halves
from delivery.kernels.kv_layout import LAYOUTS
from delivery.kernels.rope_cache_write import _inputs, reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# heads, kv_heads, head_dim: heads that are no power of two, and groups of one, four and seven.
SHAPES = ((12, 3, 32), (14, 2, 64), (5, 5, 16))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kv_dtype", list(LAYOUTS))
@pytest.mark.parametrize("norms", [False, True])
def test_programs_of_whole_tokens(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], kv_dtype: str, norms: bool
) -> None:
    monkeypatch.setattr(rope_halves, "MANY", 1)
    seen = []
    monkeypatch.setattr(rope_halves, "layout_of", lambda cache: seen.append(1) or LAYOUTS[kv_dtype])
    make = (DEVICE, torch.float32, 11, kv_dtype, *shape, shape[2], 16, False, norms)
    args, wanted = _inputs(*make), _inputs(*make)
    OPS["rope_cache_write"](*args, backend="triton")
    reference(*wanted)
    assert seen, "another kernel ran"
    # q, k, the caches and their scales, the block that nobody wrote to included.
    for got, want in zip((*args[:2], *args[6:10]), (*wanted[:2], *wanted[6:10]), strict=True):
        if isinstance(want, torch.Tensor):
            assert isinstance(got, torch.Tensor)
            assert close(got, want)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    a, b = got.double(), want.double()
    if want.dtype in (torch.int8, torch.uint8):
        # A value on the border between two steps may fall to either side; int4 packs two a byte.
        return (a != b).double().mean().item() < 0.01
    return (a - b).norm().item() <= 1e-3 * b.norm().item()
