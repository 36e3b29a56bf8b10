"""The layer-by-layer driver: error propagation, mixed recipes, memory, and everything that goes wrong."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_blocks import HF, options, tiny_model, tiny_samples, tiny_tensors

from delivery.errors import DataError
from delivery.model import StateDict, block, embed, load_block, load_config
from delivery.model.config import ModelConfig
from delivery.quantization.driver import BlockResult, Driver, Planned
from delivery.quantization.options import Options
from delivery.quantization.running import in_dtype, quantized_block
from delivery.quantization.scheme import load_scheme
from delivery.quantization.schemes import scheme_names
from delivery.quantization.stream import Stream

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def stream_of(source: StateDict, config: ModelConfig, samples: list[list[int]], chunk: int = 64) -> Stream:
    table = source.tensor("model.embed_tokens.weight")
    return Stream.start(samples, lambda ids: embed(config, table, ids), chunk_tokens=chunk)


def driver(
    source: StateDict,
    config: ModelConfig,
    scheme: str,
    *,
    opts: Options | None = None,
    samples: list[list[int]] | None = None,
    plan: dict[str, Planned] | None = None,
    **settings: Any,
) -> Driver:
    loaded = load_scheme(scheme)
    planned = plan or {n: Planned(loaded, 32 if loaded.grouped else -1) for n in LINEARS}
    stream = stream_of(source, config, tiny_samples() if samples is None else samples)
    return Driver(source, config, lambda _: planned, opts or options(), stream, **settings)


def all_blocks(d: Driver) -> list[BlockResult]:
    return [d.quantize_block(layer) for layer in range(d.config.num_layers)]


def output_error(
    source: StateDict,
    config: ModelConfig,
    results: list[BlockResult],
    samples: list[list[int]] | None = None,
) -> float:
    """Error after the last block, on other samples than those calibrated on unless some are given."""
    samples = samples or [[(7 * i + 3 * s) % 96 for i in range(25)] for s in range(4)]
    floats, quantised = stream_of(source, config, samples), stream_of(source, config, samples)
    for layer, result in enumerate(results):
        weights = load_block(source, config, layer)
        for stream, w in (
            (floats, in_dtype(weights, torch.float32)),
            (quantised, quantized_block(weights, result.work, torch.float32)),
        ):
            for piece, hidden in stream.run():
                stream.put(piece, block(config, layer, w, hidden, piece.positions, piece.mixer))
    a, b = (torch.cat([p.hidden for p in s.pieces]) for s in (quantised, floats))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("scheme", scheme_names())
def test_every_scheme_works_and_tells_its_errors(scheme: str) -> None:
    source, config = tiny_model()
    results = all_blocks(driver(source, config, scheme))
    for result in results:
        assert [e.canonical for e in result.errors] == list(LINEARS)
        for error in result.errors:
            assert 0 < error.relative_error < 0.3, error
            assert error.sqnr_db == pytest.approx(-20 * math.log10(error.relative_error))
            assert error.tokens == 120
        assert result.block_relative is not None
        assert 0 < result.block_relative < 0.3
        assert result.notes == []
    # The tiny model has planted outliers and three blocks, so the errors of 4 bits add up.
    assert output_error(source, config, results) < (0.5 if load_scheme(scheme).grouped else 0.2)


def test_smart_schemes_beat_rounding_on_text_they_were_not_fitted_to() -> None:
    source, config = tiny_model()
    many = tiny_samples(30, 40)
    error = {
        name: output_error(source, config, all_blocks(driver(source, config, scheme, opts=o, samples=many)))
        for name, scheme, o in (
            ("rtn", "rtn-w4a16", options()),
            ("awq", "awq-w4a16", options()),
            ("awq+clip", "awq-w4a16", options(clip=True)),
            ("awq+gptq", "awq-w4a16", options(rounding="gptq")),
            ("smoothed4", "smoothquant-w4a16", options()),
            ("smoothed4+gptq", "smoothquant-w4a16", options(rounding="gptq")),
            ("rtn+gptq", "rtn-w4a16", options(rounding="gptq")),
            ("gptq", "gptq-w4a16", options()),
            ("fp8", "fp8-dynamic", options()),
            ("smoothed", "smoothquant-int8", options()),
        )
    }
    assert error["awq"] < 0.9 * error["rtn"]
    assert error["gptq"] < 0.9 * error["rtn"]
    assert error["awq+clip"] < error["rtn"]
    assert error["awq+gptq"] < 0.95 * error["awq"]
    assert error["smoothed4+gptq"] < 0.95 * error["smoothed4"]
    # Rounding to nearest is what that scheme is.
    assert error["rtn+gptq"] == error["rtn"]
    assert error["smoothed"] < error["fp8"] < error["awq"]


def test_a_planted_outlier_is_what_smoothing_is_for() -> None:
    tensors = tiny_tensors()
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensor[5] *= 100
    source, config = StateDict(tensors), load_config(HF)
    plain = {n: Planned(load_scheme("smoothquant-int8")) for n in LINEARS}
    smoothed = all_blocks(driver(source, config, "smoothquant-int8", plan=plain))
    rough = all_blocks(driver(source, config, "smoothquant-int8", plan=plain, opts=options(alpha=0.0)))
    mean = [sum(e.relative_error for r in rs for e in r.errors) / 21 for rs in (smoothed, rough)]
    assert mean[0] < 0.6 * mean[1]


def test_the_next_block_is_fitted_to_the_errors_of_this_one() -> None:
    source, config = tiny_model()
    with_errors, without = (driver(source, config, "rtn-w4a16", propagate=p) for p in (True, False))
    for d in (with_errors, without):
        d.quantize_block(0)
    assert with_errors.stream is not None
    assert without.stream is not None
    floats = stream_of(source, config, tiny_samples())
    for piece, hidden in floats.run():
        weights = load_block(source, config, 0)
        floats.put(piece, block(config, 0, weights, hidden, piece.positions, piece.mixer))
    expected = torch.cat([p.hidden for p in floats.pieces])
    assert torch.allclose(torch.cat([p.hidden for p in without.stream.pieces]), expected, atol=1e-4)
    moved = torch.cat([p.hidden for p in with_errors.stream.pieces])
    assert 0.01 < float((moved - expected).norm() / expected.norm()) < 0.4


def test_the_size_of_pieces_changes_nothing() -> None:
    source, config = tiny_model()
    found = []
    for chunk in (20, 60, 1000):
        d = driver(source, config, "gptq-w4a16")
        d.stream = stream_of(source, config, tiny_samples(), chunk)
        found.append(all_blocks(d)[1].errors[6].relative_error)
    assert found[0] == pytest.approx(found[1], rel=0.02) == pytest.approx(found[2], rel=0.02)


def test_memory_stays_flat_over_layers() -> None:
    source, config = tiny_model({"num_hidden_layers": 9})
    d = driver(source, config, "gptq-w4a16")
    held = []
    for layer in range(9):
        d.quantize_block(layer)
        if layer % 3 == 2:
            gc.collect()
            held.append(sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor))
    assert held[0] == held[1] == held[2]


def test_mixed_recipes_move_scales_only_where_all_layers_follow() -> None:
    source, config = tiny_model()
    awq, eight = load_scheme("awq-w4a16"), load_scheme("w8a16")
    plan = {n: Planned(awq, 32) for n in LINEARS if n not in ("k_proj", "down_proj")}
    plan["down_proj"] = Planned(eight)
    d = driver(source, config, "awq-w4a16", plan=plan)
    result = d.quantize_block(0)
    norms = result.work.norms
    assert norms["input_norm"] is result.work.source_norms["input_norm"]  # k_proj stays float
    assert norms["pre_mlp_norm"] is not result.work.source_norms["pre_mlp_norm"]
    assert {e.canonical: e.scheme for e in result.errors}["down_proj"] == "w8a16"
    assert result.work.layers["k_proj"].result is None
    assert result.block_relative is not None
    assert result.block_relative < 0.2


def test_a_scheme_that_needs_data_says_so() -> None:
    source, config = tiny_model()
    d = driver(source, config, "awq-w4a16")
    d.stream = None
    with pytest.raises(DataError, match=r"'awq-w4a16' needs calibration data[\s\S]*gram"):
        d.quantize_block(0)


ROBUST = ("rtn-w4a16", "awq-w4a16", "gptq-w4a16", "smoothquant-int8", "smoothquant-fp8", "fp8-static")


def finite(results: list[BlockResult]) -> bool:
    good = True
    for result in results:
        for layer in result.work.layers.values():
            assert layer.result is not None
            q = layer.result
            good &= bool(torch.isfinite(q.scale.float()).all()) and bool((q.scale.float() > 0).all())
            good &= bool(torch.isfinite(q.dequantize()).all())
        good &= all(bool(torch.isfinite(n.weight).all()) for n in result.work.norms.values())
    return good


@pytest.mark.parametrize("scheme", ROBUST)
@pytest.mark.parametrize("clip", [False, True])
def test_dead_channels(scheme: str, clip: bool) -> None:
    tensors = tiny_tensors()
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensor[[3, 40]] = 0.0  # a norm that silences a channel
        if "up_proj" in name:
            tensor[10] = 0.0  # an inner channel that is never on
        if "q_proj" in name:
            tensor[:, 7] = 0.0  # an input that nobody reads
    source, config = StateDict(tensors), load_config(HF)
    results = all_blocks(driver(source, config, scheme, opts=options(clip=clip)))
    assert finite(results)
    assert output_error(source, config, results) < 0.5


@pytest.mark.parametrize("scheme", ROBUST)
def test_groups_of_zeros(scheme: str) -> None:
    tensors = tiny_tensors()
    for name, tensor in tensors.items():
        if "proj" in name:
            tensor[::3, :32] = 0.0
            tensor[5] = 0.0
    source, config = StateDict(tensors), load_config(HF)
    results = all_blocks(driver(source, config, scheme))
    assert finite(results)
    assert output_error(source, config, results) < 0.5
    down = results[0].work.layers["down_proj"].result
    assert down is not None
    assert float(down.dequantize()[5].abs().max()) == 0.0


@pytest.mark.parametrize("scheme", ROBUST)
def test_constant_activations(scheme: str) -> None:
    source, config = tiny_model()
    results = all_blocks(driver(source, config, scheme, samples=[[5] * 30] * 3))
    assert finite(results)
    assert output_error(source, config, results, [[5] * 20]) < 0.5


@pytest.mark.parametrize("scheme", ROBUST)
def test_samples_of_one_token(scheme: str) -> None:
    source, config = tiny_model()
    results = all_blocks(driver(source, config, scheme, samples=[[3], [9], [60]]))
    assert finite(results)
    assert results[0].errors[0].tokens == 3
    assert output_error(source, config, results) < 0.7


@pytest.mark.parametrize("scheme", ROBUST)
def test_infinities_in_activations_are_left_out_and_named(scheme: str) -> None:
    source, config = tiny_model()
    d = driver(source, config, scheme)
    assert d.stream is not None
    piece = d.stream.pieces[0]
    piece.hidden = piece.hidden.clone()
    piece.hidden[19, 3] = float("inf")  # the last token of a sample, which no other one sees
    results = all_blocks(d)
    assert finite(results)
    assert any(
        "model.layers.0.self_attn.q_proj: 1 tokens with infinite or NaN inputs were left out" in n
        for n in results[0].notes
    )
    assert output_error(source, config, results) < 0.5


def test_a_layer_that_is_quantised_already_is_refused() -> None:
    tensors: dict[str, Any] = tiny_tensors()
    name = "model.layers.0.mlp.up_proj.weight"
    from delivery.quantization import quantize

    tensors[name] = quantize(tensors[name], group_size=32)
    with pytest.raises(DataError, match=r"model\.layers\.0\.mlp\.up_proj is already quantised"):
        driver(StateDict(tensors), load_config(HF), "rtn-w4a16").quantize_block(0)


def test_cache_scales_cover_every_key_at_every_position() -> None:
    source, config = tiny_model()
    d = driver(source, config, "rtn-w4a16", kv="int8", propagate=False)
    result = d.quantize_block(0)
    assert set(result.kv) == {"k_scale", "v_scale"}
    weights = load_block(source, config, 0)
    seen = torch.cat([p.hidden for p in stream_of(source, config, tiny_samples()).pieces])
    x = weights.norms["input_norm"](seen)
    k, v = (weights.linears[n](x).reshape(-1, 2, 16) for n in ("k_proj", "v_proj"))
    assert float(result.kv["v_scale"]) == pytest.approx(float(v.abs().max()) / 127, rel=1e-4)
    longest = torch.hypot(k[..., :8], k[..., 8:]).max()
    assert float(result.kv["k_scale"]) == pytest.approx(float(longest) / 127, rel=1e-4)


def test_half_precision_blocks_give_nearly_the_same() -> None:
    source, config = tiny_model()
    one = all_blocks(driver(source, config, "awq-w4a16"))
    d = driver(source, config, "awq-w4a16", dtype=torch.bfloat16)
    assert d.stream is not None
    for piece in d.stream.pieces:
        piece.hidden = piece.hidden.to(torch.bfloat16)
    other = all_blocks(d)
    a, b = (sum(e.relative_error for r in rs for e in r.errors) for rs in (one, other))
    assert a == pytest.approx(b, rel=0.1)
    assert replace(other[0].errors[0], relative_error=0.0).name == "model.layers.0.self_attn.q_proj"
