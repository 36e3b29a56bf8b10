"""Fine-tuning of the last blocks: it helps on samples that it did not see, or changes nothing."""

from __future__ import annotations

import pytest
import torch
from tiny_blocks import options, tiny_model, tiny_samples

from delivery.errors import DataError
from delivery.model import block, embed, load_block
from delivery.quantization.driver import BlockResult, Driver, Planned
from delivery.quantization.qat import Trainable, Tuning, refine
from delivery.quantization.running import in_dtype
from delivery.quantization.scheme import load_scheme
from delivery.quantization.stream import Stream

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def prepared(scheme: str, samples: list[list[int]]) -> tuple[list[BlockResult], Stream, Stream, list, object]:
    """Three quantised blocks; the streams before the last two, and of the float model behind them."""
    source, config = tiny_model()
    table = source.tensor("model.embed_tokens.weight")
    stream = Stream.start(samples, lambda ids: embed(config, table, ids), chunk_tokens=60)
    target = stream.copy()
    loaded = load_scheme(scheme)
    planned = {n: Planned(loaded, 32 if loaded.grouped else -1) for n in LINEARS}
    driver = Driver(source, config, lambda _: planned, options(), stream)
    results = [driver.quantize_block(0)]
    before = stream.copy()
    results += [driver.quantize_block(layer) for layer in (1, 2)]
    weights = [load_block(source, config, layer) for layer in range(3)]
    for layer, w in enumerate(weights):
        for piece, hidden in target.run():
            running = in_dtype(w, torch.float32)
            target.put(piece, block(config, layer, running, hidden, piece.positions, piece.mixer))
    return results[1:], before, target, weights[1:], config


@pytest.mark.parametrize("scheme", ["rtn-w4a16", "gptq-w4a16", "smoothquant-int8"])
def test_the_error_on_other_samples_falls(scheme: str) -> None:
    results, stream, target, weights, config = prepared(scheme, tiny_samples(30, 30))
    first = results[0].work.layers["down_proj"].result
    assert first is not None
    tuned = refine(config, results, weights, stream, target, torch.float32, Tuning(steps=40))  # type: ignore[arg-type]
    assert tuned.after < (0.9 if scheme == "rtn-w4a16" else 1.0) * tuned.before
    after = results[0].work.layers["down_proj"].result
    assert after is not None
    assert (after.qdata.dtype, after.scale.dtype) == (first.qdata.dtype, first.scale.dtype)
    assert not torch.equal(after.dequantize(), first.dequantize())


def test_what_does_not_help_is_not_kept() -> None:
    results, stream, target, weights, config = prepared("rtn-w4a16", tiny_samples(8, 30))
    first = results[0].work.layers["q_proj"].result
    assert first is not None
    wild = Tuning(steps=5, rate=30.0, scale_rate=5.0)
    tuned = refine(config, results, weights, stream, target, torch.float32, wild)  # type: ignore[arg-type]
    assert tuned.after == tuned.before
    assert results[0].work.layers["q_proj"].result is first


@pytest.mark.parametrize("scheme", ["awq-w4a16", "gptq-w4a16", "smoothquant-fp8"])
def test_tuning_begins_at_what_the_scheme_chose(scheme: str) -> None:
    results, *_ = prepared(scheme, tiny_samples(4, 20))
    for layer in results[0].work.layers.values():
        assert layer.result is not None
        again = Trainable(layer.result, layer.weight, None).result()
        assert torch.equal(again.qdata.float(), layer.result.qdata.float())
        assert torch.equal(again.scale, layer.result.scale)


def test_too_few_samples_are_refused() -> None:
    results, stream, target, weights, config = prepared("rtn-w4a16", tiny_samples(2, 20))
    with pytest.raises(DataError, match="too few samples"):
        refine(config, results, weights, stream, target, torch.float32, Tuning())  # type: ignore[arg-type]
