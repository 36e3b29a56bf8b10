"""Quantising what is stored unlike Llama: fused and reordered rows, experts apart and in one tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import torch
from quantize_fixtures import WORDS, context, tokenizer_files
from safetensors.torch import load_file, save_file
from tiny_families import build

from delivery.checkpoint import Checkpoint
from delivery.engine import LLM
from delivery.steps.calibrate import Calibrate
from delivery.steps.quantize import Quantize

IDS = (torch.arange(40) * 7 % 320).tolist()


def save(name: str, directory: Path) -> Path:
    build(name, vocab_size=320, initializer_range=0.1).save_pretrained(directory)
    for file, text in tokenizer_files(320).items():
        (directory / file).write_text(text, "utf-8")
    return directory


def stack(directory: Path) -> Path:
    """The experts of each layer in two tensors, as some publishers store them."""
    state = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp.experts"
        if f"{at}.0.gate_proj.weight" not in state:
            continue
        parts = {
            kind: [state.pop(f"{at}.{e}.{kind}_proj.weight") for e in range(6)]
            for kind in ("gate", "up", "down")
        }
        pairs = zip(parts["gate"], parts["up"], strict=True)
        state[f"{at}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        state[f"{at}.down_proj"] = torch.stack(parts["down"])
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def logits(directory: Path) -> torch.Tensor:
    with LLM(directory, block_size=16) as llm:
        return torch.cat(list(llm.logits(IDS)))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def quantize(folder: Path, model: Path, **settings: Any) -> Any:
    folder.mkdir(exist_ok=True)
    corpus = folder / "own.jsonl"
    corpus.write_text("\n".join(json.dumps({"text": f"{i * 7}: {WORDS}" * 4}) for i in range(40)))
    cal = context(folder, "cal", checkpoint=model)
    Calibrate(checkpoint="m", corpus=str(corpus), samples=8, sequence_length=48).run(cal)
    ctx = context(folder, "q", checkpoint=model, calibration=cal.out)
    Quantize(checkpoint="m", **settings).run(ctx)
    return ctx


CASES = [
    ("phi3", {"scheme": "awq-w4a16", "group_size": "32", "format": "compressed-tensors"}, 0.5),
    ("glm", {"scheme": "smoothquant-int8", "format": "compressed-tensors"}, 0.1),
    ("gemma3", {"scheme": "awq-w4a16", "group_size": "32", "format": "gptq"}, 0.5),
    ("mixtral", {"scheme": "smoothquant-int8", "format": "smooth_quant"}, 0.2),
    # Random routers change their mind over little; rows in a wrong place give 1.4.
    ("qwen3-next", {"scheme": "w8a16", "group_size": "16", "format": "compressed-tensors"}, 0.4),
    ("qwen3.5", {"scheme": "smoothquant-int8", "format": "compressed-tensors"}, 0.2),
    ("qwen2-moe", {"scheme": "w8a16", "group_size": "16", "format": "compressed-tensors"}, 0.2),
]


@pytest.mark.parametrize(("name", "settings", "limit"), CASES, ids=[c[0] for c in CASES])
def test_a_quantised_model_computes_nearly_the_same(
    name: str, settings: dict[str, Any], limit: float, tmp_path: Path
) -> None:
    model = save(name, tmp_path / "m")
    ctx = quantize(tmp_path, model, **settings)
    assert 0 < distance(logits(ctx.out), logits(model)) < limit


@pytest.mark.parametrize("name", ["phi3", "glm", "qwen3.5"])
def test_fused_and_reordered_rows_are_where_transformers_wants_them(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = save(name, tmp_path / "m")
    ctx = quantize(tmp_path, model, scheme="w8a16", format="compressed-tensors")
    loaded = AutoModelForCausalLM.from_pretrained(ctx.out, dtype=torch.float32)
    with torch.no_grad():
        theirs = loaded(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(ctx.out), theirs, atol=1e-3, rtol=0)


def test_layers_that_no_group_divides_stay_plain_and_are_listed(tmp_path: Path) -> None:
    model = tmp_path / "m"
    sizes = {"hidden_size": 76, "head_dim": 24, "intermediate_size": 112}
    build("llama", vocab_size=320, **sizes).save_pretrained(model)
    for file, text in tokenizer_files(320).items():
        (model / file).write_text(text, "utf-8")
    ctx = quantize(tmp_path, model, scheme="rtn-w4a16", format="compressed-tensors")
    written = Checkpoint.open(ctx.out)
    at = "model.layers.1"
    assert written.has(f"{at}.self_attn.q_proj.weight")  # 76 input features
    assert written.has(f"{at}.self_attn.o_proj.weight_packed")  # 96, in groups of 32
    assert written.has(f"{at}.mlp.down_proj.weight_packed")  # 112, in groups of 16
    assert {f"{at}.self_attn.q_proj", f"{at}.mlp.up_proj"} <= set(written.quantization["ignore"])  # type: ignore[index]
    assert "q_proj (layers 0 to 2): left in floating point: groups of 128 do not divide 76" in ctx.texts(
        "info"
    )
    assert 0 < distance(logits(ctx.out), logits(model)) < 0.5


def test_stacked_experts_are_the_same_experts(tmp_path: Path) -> None:
    apart, together = save("qwen3-moe", tmp_path / "a"), stack(save("qwen3-moe", tmp_path / "b"))
    assert torch.equal(logits(apart), logits(together))
    made = [
        quantize(
            folder.parent / f"q-{folder.name}", folder, scheme="rtn-w4a16", group_size="16", format="gptq"
        )
        for folder in (apart, together)
    ]
    first, second = (Checkpoint.open(ctx.out) for ctx in made)
    assert set(first.names()) == set(second.names())
    assert torch.equal(logits(first.path), logits(second.path))


def test_experts_that_are_skipped_leave_a_stack_whole(tmp_path: Path) -> None:
    model = stack(save("qwen3-moe", tmp_path / "m"))
    source = Checkpoint.open(model).tensor("model.layers.1.mlp.experts.down_proj")
    ctx = quantize(tmp_path, model, scheme="rtn-w4a16", group_size="16", skip="*experts.2.*", format="gptq")
    written = Checkpoint.open(ctx.out)
    assert not written.has("model.layers.1.mlp.experts.down_proj")
    assert torch.equal(written.tensor("model.layers.1.mlp.experts.2.down_proj.weight"), source[2])
    assert written.has("model.layers.1.mlp.experts.1.down_proj.qweight")
    assert 0 < distance(logits(ctx.out), logits(model)) < 0.5


@pytest.mark.parametrize("name", ["Qwen2VLForConditionalGeneration", "LlavaForConditionalGeneration"])
def test_of_a_vision_language_model_only_the_language_tower_changes(name: str, tmp_path: Path) -> None:
    import transformers

    model = tmp_path / "m"
    tiny_vision.build(name).save_pretrained(model)
    for file, text in tokenizer_files(320).items():
        (model / file).write_text(text, "utf-8")
    (model / "preprocessor_config.json").write_text('{"size": {"height": 16}}')
    ctx = quantize(tmp_path, model, scheme="w8a16", format="compressed-tensors")
    source, written = Checkpoint.open(model), Checkpoint.open(ctx.out)
    others = [n for n in source.names() if not ("model.layers." in n and n.endswith("proj.weight"))]
    assert any("vis" in n for n in others)
    for tensor in others:
        assert torch.equal(written.tensor(tensor), source.tensor(tensor)), tensor
    assert len(source.names()) - len(others) == 2 * 7
    assert (ctx.out / "preprocessor_config.json").read_text() == '{"size": {"height": 16}}'
    loaded = getattr(transformers, name).from_pretrained(ctx.out, dtype=torch.float32)
    with torch.no_grad():
        theirs = loaded(input_ids=torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(ctx.out), theirs, atol=1e-3, rtol=0)
    assert 0 < distance(theirs, logits(model)) < 0.1
