"""Moving scales changes nothing that the block computes."""

from __future__ import annotations

import pytest
import torch
from tiny_blocks import options, tiny_model

from delivery.model import DenseAttention, block, load_block
from delivery.model.weights import Norm
from delivery.quantization import absorb
from delivery.quantization.work import BlockWork


def scales(size: int, seed: int = 3) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)) * 4 + 0.1


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scale_that_comes_back_undoes_the_division_exactly(plus_one: bool, dtype: torch.dtype) -> None:
    weight = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[7] = -1.0 if plus_one else 0.0
    norm = Norm("n", weight, 1e-5, plus_one)
    absorbed = absorb.into_norm(norm, scales(64))
    assert absorbed.norm.weight.dtype == dtype
    assert torch.allclose(absorbed.norm.effective() * absorbed.scale, norm.effective(), rtol=1e-6, atol=0)
    assert float(absorbed.scale[7]) == 1.0
    moved = absorbed.scale[torch.arange(64) != 7]
    assert torch.allclose(
        moved, scales(64)[torch.arange(64) != 7], rtol=0.3 if dtype == torch.bfloat16 else 1e-3
    )


def test_heads_that_share_values_share_their_scale() -> None:
    tied = absorb.shared_by_heads(scales(4 * 16), heads=4, kv_heads=2, head_dim=16)
    assert torch.equal(tied[:16], tied[16:32])
    assert not torch.equal(tied[16:32], tied[32:48])
    rows = absorb.rows_of_values(tied, heads=4, kv_heads=2, head_dim=16)
    assert torch.equal(rows, torch.cat([tied[:16], tied[32:48]]))


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_block_with_every_scale_moved_computes_the_same(biases: bool, kv_heads: int) -> None:
    source, config = tiny_model({"num_key_value_heads": kv_heads}, biases=biases)
    weights = load_block(source, config, 1)
    work = BlockWork(config, 1, weights, dict.fromkeys(weights.linears, 32), options())
    for group in work.groups:
        assert work.movable(group), group
        work.move(group, work.tied(group, scales(work.layers[group.key].source.in_features)))
    hidden = torch.randn(11, 64, generator=torch.Generator().manual_seed(5))
    args = (hidden, torch.arange(11), DenseAttention())
    expected, actual = block(config, 1, weights, *args), block(config, 1, work.float_block(), *args)
    assert float((actual - expected).norm() / expected.norm()) < 2e-6
    assert not torch.equal(work.norms["input_norm"].weight, weights.norms["input_norm"].weight)
    assert not torch.allclose(work.layers["up_proj"].weight, weights.linears["up_proj"].weight)


def test_layers_that_stay_untouched_forbid_moving_a_scale() -> None:
    source, config = tiny_model()
    weights = load_block(source, config, 0)
    planned = {n: 32 for n in weights.linears if n not in ("k_proj", "up_proj")}
    work = BlockWork(config, 0, weights, planned, options())
    movable = {g.key: work.movable(g) for g in work.groups}
    assert movable == {"q_proj": False, "o_proj": True, "gate_proj": False, "down_proj": False}


def test_grouped_queries_refuse_values_to_output_where_scales_may_not_be_shared() -> None:
    source, config = tiny_model()
    weights = load_block(source, config, 0)
    work = BlockWork(config, 0, weights, dict.fromkeys(weights.linears, 32), options())
    into_output = next(g for g in work.groups if g.key == "o_proj")
    assert work.movable(into_output)
    assert not work.movable(into_output, shared_heads=False)
