"""Mixture of experts: shared inputs, routers that follow, experts that no token reached."""

from __future__ import annotations

import pytest
import torch
from tiny_blocks import HF, options

from delivery.model import load_config
from delivery.model.weights import BlockWeights, Linear, Norm
from delivery.quantization.inputs import input_groups
from delivery.quantization.plan import _shape
from delivery.quantization.scheme import load_scheme
from delivery.quantization.statistics import InputStatistics
from delivery.quantization.work import BlockWork, coverage

EXPERTS = 4
HIDDEN, INNER = 64, 32


def weights() -> BlockWeights:
    random = torch.Generator().manual_seed(0)

    def linear(name: str, rows: int, columns: int) -> Linear:
        weight = torch.randn(rows, columns, generator=random) * columns**-0.5
        return Linear(f"model.layers.0.mlp.{name}", weight)

    sizes = {"router": (EXPERTS, HIDDEN)}
    for e in range(EXPERTS):
        sizes[f"experts.{e}.gate_proj"] = sizes[f"experts.{e}.up_proj"] = (INNER, HIDDEN)
        sizes[f"experts.{e}.down_proj"] = (HIDDEN, INNER)
    norm = 1 + torch.randn(HIDDEN, generator=random) * 0.2
    norm[::16] *= 10
    return BlockWeights(
        {name: linear(name, *shape) for name, shape in sizes.items()},
        {"pre_mlp_norm": Norm("model.layers.0.post_attention_layernorm.weight", norm, 1e-5)},
    )


def moe(block: BlockWeights, hidden: torch.Tensor) -> torch.Tensor:
    """Top-1 routing, written down plainly."""
    x = block.norms["pre_mlp_norm"](hidden)
    gates = torch.softmax(block.linears["router"](x), -1)
    share, chosen = gates.max(-1)
    out = torch.zeros_like(hidden)
    for e in range(EXPERTS):
        rows = chosen == e
        inner = torch.nn.functional.silu(block.linears[f"experts.{e}.gate_proj"](x[rows]))
        inner = inner * block.linears[f"experts.{e}.up_proj"](x[rows])
        out[rows] = share[rows, None] * block.linears[f"experts.{e}.down_proj"](inner)
    return out


def prepared(tokens_of: list[int], **changes: object) -> tuple[BlockWork, BlockWeights]:
    block = weights()
    planned = {name: 32 for name in block.linears if name != "router"}
    work = BlockWork(load_config(HF), 0, block, planned, options(**changes))
    random = torch.Generator().manual_seed(2)
    for group in work.groups:
        features = work.layers[group.key].source.in_features
        statistics = InputStatistics(features, with_gram=True)
        count = 300 if group.expert is None else tokens_of[group.expert]
        x = torch.randn(count, features, generator=random)
        x[:, ::16] *= 12
        statistics.update(x)
        work.statistics[group.key] = statistics
    return work, block


def test_all_layers_behind_the_router_share_one_input() -> None:
    groups = {g.key: g for g in input_groups(weights().linears)}
    assert set(groups) == {"router", *(f"experts.{e}.down_proj" for e in range(EXPERTS))}
    assert groups["router"].norm == "pre_mlp_norm"
    assert len(groups["router"].linears) == 1 + 2 * EXPERTS
    assert groups["experts.2.down_proj"].rows_of == "experts.2.up_proj"
    assert groups["experts.2.down_proj"].expert == 2


def test_moving_scales_leaves_the_routing_and_the_output_alone() -> None:
    work, block = prepared([100] * EXPERTS)
    for group in work.groups:
        assert work.movable(group)
        size = work.layers[group.key].source.in_features
        work.move(group, torch.rand(size, generator=torch.Generator().manual_seed(1)) * 3 + 0.2)
    hidden = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(4))
    expected, actual = moe(block, hidden), moe(work.float_block(), hidden)
    assert float((actual - expected).norm() / expected.norm()) < 1e-5
    assert not torch.equal(work.layers["router"].weight, block.linears["router"].weight)


@pytest.mark.parametrize("scheme", ["awq-w4a16", "gptq-w4a16", "smoothquant-int8", "fp8-static"])
def test_experts_without_tokens_are_rounded_and_named(scheme: str) -> None:
    work, _ = prepared([120, 0, 5, 120], clip=True)
    load_scheme(scheme).quantize(work)
    results = {n: layer.result for n, layer in work.layers.items()}
    assert results.pop("router") is None
    for name, q in results.items():
        assert q is not None, name
        assert bool(torch.isfinite(q.scale.float()).all())
    named = [n for n in work.notes if "experts" in n]
    assert any("experts.1.down_proj: " in n for n in named)
    if scheme != "fp8-static":
        assert sum("so it is rounded to nearest" in n for n in named) == 2
        assert any("experts.2.down_proj: 5 calibration tokens" in n for n in named)
    assert coverage(work) == [
        "layer 0: 2 of 4 experts saw fewer than 32 calibration tokens, 1 of them none: calibrate on more text"
    ]


def test_an_expert_in_a_stacked_tensor_has_a_shape_of_its_own() -> None:
    from delivery.model.families.family import Part

    shapes = {"experts.gate_up_proj": (4, 64, 48), "experts.down_proj": (4, 48, 96)}
    plain = Part("experts.gate_up_proj", rows=(range(32),), expert=2)
    assert _shape(plain, "experts.gate_up_proj", shapes.__getitem__) == (32, 48)
    turned = Part("experts.down_proj", expert=1, transposed=True)
    assert _shape(turned, "experts.down_proj", shapes.__getitem__) == (96, 48)
