"""Cache layouts: what is stored comes back, in the bytes that the memory plan counts."""

from __future__ import annotations

import pytest
import torch

from delivery.errors import UsageError
from delivery.kernels.kv_layout import LAYOUTS, gather, kv_layout, layout_of, scatter

# Half a step: absmax / 127 / 2 against a normal value; e4m3 keeps 3 bits of mantissa; int4 has 15 steps.
ERROR = {"auto": 0.0, "int8": 0.01, "fp8": 0.03, "int4": 0.11}


@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_scatter_then_gather_gives_back_the_values(name: str, head_dim: int) -> None:
    layout = kv_layout(name)
    values, scales = layout.allocate(4, 16, 3, head_dim, torch.float32, "cpu")
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:20]
    x = torch.randn(20, 3, head_dim, generator=torch.Generator().manual_seed(2))
    scatter(values, scales, slots, *layout.quantize(x))
    back = layout.dequantize(*gather(values, scales, slots))
    assert (back - x).norm() / x.norm() <= ERROR[name]
    assert layout_of(values) is layout
    others = torch.tensor(sorted(set(range(64)) - set(slots.tolist())))
    assert not gather(values, scales, others)[0].float().any()


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_allocated_bytes_are_the_bytes_that_the_plan_counts(name: str) -> None:
    layout = kv_layout(name)
    values, scales = layout.allocate(5, 32, 2, 128, torch.bfloat16, "cpu")
    stored = values.numel() * values.element_size() + (0 if scales is None else scales.numel() * 4)
    assert stored == 5 * 32 * 2 * layout.token_head_bytes(128, torch.bfloat16)


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_one_head_of_a_quantised_block_is_contiguous(name: str) -> None:
    values, scales = kv_layout(name).allocate(2, 16, 3, 64, torch.float16, "cpu")
    assert values[1, :, 2].is_contiguous()
    assert scales is not None
    assert scales[1, 2].is_contiguous()


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_a_constant_or_zero_head_stays_finite(name: str) -> None:
    layout = kv_layout(name)
    for value in (0.0, -3.0):
        x = torch.full((2, 1, 64), value)
        back = layout.dequantize(*layout.quantize(x))
        assert back.isfinite().all()
        assert (back - x).abs().max() <= 0.02


def test_int4_keeps_a_channel_of_one_sign_that_symmetric_quantisation_would_waste() -> None:
    x = torch.rand(64, 1, 128, generator=torch.Generator().manual_seed(3)) + 10
    back = kv_layout("int4").dequantize(*kv_layout("int4").quantize(x))
    assert (back - x).abs().max() <= 1 / 15 / 2 + 1e-5


def test_an_unknown_layout_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown KV cache dtype 'int6'") as caught:
        kv_layout("int6")
    assert "did you mean" in caught.value.render()
