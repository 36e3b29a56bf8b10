"""What quantize writes, read by others: transformers, and a reader of AWQ's layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from demo_run import run_demo
from safetensors.torch import load_file

from delivery.checkpoint import Checkpoint
from delivery.engine import LLM
from delivery.qtensor import QTensor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    # transformers warns that the option to unpack while loading is added to the checkpoint's own settings.
    pytest.mark.filterwarnings("ignore:You passed .quantization_config."),
]

POSITIONS = 512
TIE = 0.02
"""Logits so close that float32 sums in another order may swap them after thirty bfloat16 layers."""


@pytest.fixture(scope="module")
def quantized(workdir) -> Path:
    """The demo's quantised model, found cached where the whole demo was run before."""
    ran = run_demo(workdir, "--until", "quantize")
    assert ran.code == 0, ran.err
    return Path(ran.step("quantize")["path"])


@pytest.fixture(scope="module")
def compressed(quantized, workdir) -> Path:
    """The demo's quantised model, exported once more as compressed-tensors."""
    ran = run_demo(workdir, "--until", "quantize", "--set", "quantize.format=compressed-tensors")
    assert ran.code == 0, ran.err
    assert ran.cached[:2] == ["convert", "calibrate"]
    return Path(ran.step("quantize")["path"])


@pytest.fixture(scope="module")
def theirs(compressed):
    """The export in transformers: zero points make it unpack while loading."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        compressed,
        dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    ).eval()


def read_awq(tensors: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    """float32 [N, K]: (q − z) · s; column 8c + order[i] lies in nibble i of word c (AutoAWQ, gemm)."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def nibbles(words: torch.Tensor) -> torch.Tensor:
        parts = (words[..., None] >> (4 * torch.arange(8))) & 15
        return torch.empty_like(parts).index_copy_(-1, order, parts).flatten(1)

    scales = tensors[f"{layer}.scales"].float()
    q, z = nibbles(tensors[f"{layer}.qweight"]), nibbles(tensors[f"{layer}.qzeros"])
    size = q.shape[0] // z.shape[0]
    return ((q - z.repeat_interleave(size, 0)) * scales.repeat_interleave(size, 0)).T


def test_both_exports_hold_the_same_weights(quantized, compressed):
    tensors = load_file(quantized / "model.safetensors")
    layers = sorted(name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight"))
    assert len(layers) == 7 * 30
    other = Checkpoint.open(compressed)
    for layer in layers:
        weight = other.weight(layer)
        assert isinstance(weight, QTensor)
        assert torch.equal(weight.dequantize(torch.float32), read_awq(tensors, layer)), layer


def test_greedy_tokens_agree_with_transformers(compressed, theirs):
    suite = (Path(__file__).parents[2] / "smoke" / "english.yaml").read_text("utf-8")
    with LLM(compressed, device="cpu", dtype="float32") as llm:
        ids = llm.encode(suite)[:POSITIONS]
        ours = torch.cat(list(llm.logits(ids)))
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert ours.shape[0] == len(ids) == POSITIONS
    mine, other = ours.argmax(-1), expected.argmax(-1)
    differing = (mine != other).nonzero()[:, 0].tolist()
    assert len(differing) <= POSITIONS // 100
    for at in differing:
        gap = expected[at, other[at]] - expected[at, mine[at]]
        assert gap < TIE, (at, float(gap))
