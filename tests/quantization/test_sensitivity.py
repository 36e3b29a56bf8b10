"""Influence of output features on the block, and the reference search that runs the block."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_blocks import options, tiny_model, tiny_samples

from delivery.model import block, embed, load_block
from delivery.model.config import MoESpec
from delivery.quantization.awq import search_scale
from delivery.quantization.block_search import search_block, why_not
from delivery.quantization.driver import Driver, Planned
from delivery.quantization.grid import Grid
from delivery.quantization.measure import output_error
from delivery.quantization.observe import watch_inputs
from delivery.quantization.running import quantized_block
from delivery.quantization.scheme import load_scheme
from delivery.quantization.sensitivity import sensitivity
from delivery.quantization.stream import Stream
from delivery.quantization.work import BlockWork

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def setup(samples: int = 20, length: int = 25) -> tuple:
    source, config = tiny_model()
    table = source.tensor("model.embed_tokens.weight")
    texts = tiny_samples(samples, length)
    stream = Stream.start(texts, lambda ids: embed(config, table, ids), chunk_tokens=512)
    return source, config, stream


def test_influence_is_that_of_the_formula() -> None:
    source, config, stream = setup()
    weights = load_block(source, config, 0)
    found = sensitivity(config, 0, weights, stream)
    assert set(found) == set(LINEARS)
    # The last layer is added to the output as it is, so every feature has the influence 1.
    assert torch.allclose(found["down_proj"], torch.ones(64))
    seen: list[torch.Tensor] = []

    def watching(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return weights.linears["gate_proj"](x)

    with torch.no_grad():
        for piece, hidden in stream.run():
            watched = weights.with_linears({"gate_proj": watching})
            block(config, 0, watched, hidden, piece.positions, piece.mixer)
    gate = weights.linears["gate_proj"](torch.cat(seen))
    down = weights.linears["down_proj"].weight
    exact = torch.nn.functional.silu(gate).square().mean(0) * down.square().sum(0)
    together = torch.corrcoef(torch.stack([found["up_proj"], exact]))[0, 1]
    assert float(together) > 0.95
    assert 0.8 < float(found["up_proj"].sum() / exact.sum()) < 1.25


def test_rows_that_do_not_matter_do_not_decide() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(300, 64, generator=random)
    x[:, ::16] *= 30
    weight = torch.randn(40, 64, generator=random)
    weight[20:, 1::16] *= 40  # these rows want other channels protected
    gram, matter = x.T @ x, torch.cat([torch.ones(20), torch.zeros(20)])
    alone = search_scale(weight[:20], gram, Grid(4, 32))
    ignored = search_scale(weight, gram, Grid(4, 32), matter=matter)
    assert abs(alone.ratio - ignored.ratio) <= 0.25
    assert ignored.loss < 1.1 * alone.loss


def block_error(weights: object, work: BlockWork, stream: Stream) -> float:
    lost = total = 0.0
    with torch.no_grad():
        quantized = quantized_block(weights, work, torch.float32)  # type: ignore[arg-type]
        for piece, hidden in stream.run():
            args = (work.config, work.layer)
            out = block(*args, quantized, hidden, piece.positions, piece.mixer)
            expected = block(*args, weights, hidden, piece.positions, piece.mixer)  # type: ignore[arg-type]
            error, size = output_error(out, expected)
            lost, total = lost + error, total + size
    return float((lost / total) ** 0.5)


def test_the_search_over_gram_matrices_is_as_good_as_running_the_block() -> None:
    source, config, stream = setup(40, 30)
    fast = plain = slow = 0.0
    for layer in range(3):
        weights = load_block(source, config, layer)
        work = BlockWork(config, layer, weights, dict.fromkeys(LINEARS, 32), options())
        watched, watches = watch_inputs(weights, work.groups, torch.device("cpu"), with_gram=False)
        for piece, hidden in stream.run():
            with torch.no_grad():
                block(config, layer, watched, hidden, piece.positions, piece.mixer)
        work.statistics = {key: watch.statistics for key, watch in watches.items()}
        search_block(work, weights, stream)
        slow += block_error(weights, work, stream)
        for name in ("awq-w4a16", "rtn-w4a16"):
            planned = dict.fromkeys(LINEARS, Planned(load_scheme(name), 32))
            driver = Driver(source, config, lambda _, p=planned: p, options(), stream.copy(), propagate=False)
            error = block_error(weights, driver.quantize_block(layer).work, stream)
            fast, plain = fast + error * (name == "awq-w4a16"), plain + error * (name == "rtn-w4a16")
    assert fast < 1.05 * slow
    assert fast < 0.95 * plain


def test_blocks_of_another_kind_are_refused_before_anything_is_changed() -> None:
    source, config, stream = setup()
    experts = MoESpec(2, 1, intermediate_size=32, normalize_topk=True, layers=(1,))
    for other, reason in (
        (replace(config, sandwich_norms=True), "pass another norm"),
        (replace(config, attention_gate=True), "output gate"),
        (replace(config, layer_types=("linear_attention",) * config.num_layers), "gated delta rule"),
        (replace(config, moe=experts), "mixture of experts"),
    ):
        assert reason in str(why_not(other, 1))
        weights = load_block(source, config, 1)
        work = BlockWork(config, 1, weights, dict.fromkeys(LINEARS, 32), options())
        work.config = other
        with pytest.raises(
            ValueError, match=f"block 1 cannot be searched by running its modules: .*{reason}"
        ):
            search_block(work, weights, stream)
    assert why_not(config, 1) is None
    assert why_not(replace(config, moe=experts), 0) is None
