"""What convert decides beside names: ties as stored, one dtype, no NaN, the stated architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoint import write_tokenizer

from delivery.checkpoint import Checkpoint
from delivery.checkpoint.convert import convert, open_source
from delivery.errors import DataError, UsageError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 8,
    "tie_word_embeddings": False,
}
EMBED, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"


def source(path: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    folder = path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def write(path: Path, folder: Path, **options: object) -> tuple[Checkpoint, list[str]]:
    opened = open_source(folder, **options)
    convert(opened, path / "out", 10**9, lambda done: None)
    return Checkpoint.open(path / "out"), opened.notes


def refused(path: Path, folder: Path, **options: object) -> DataError | UsageError:
    with pytest.raises((DataError, UsageError), match=r"error\[") as caught:
        write(path, folder, **options)
    assert not (path / "out").exists()
    return caught.value


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_what_is_canonical_already_stays_as_it_is(tmp_path: Path) -> None:
    tensors = {EMBED: rand(8, 8), HEAD: rand(8, 8, seed=1), UP: rand(8, 8, seed=2)}
    checkpoint, notes = write(tmp_path, source(tmp_path, tensors))
    assert notes == []
    assert checkpoint.config == CONFIG
    assert all(torch.equal(checkpoint.tensor(n), t) for n, t in tensors.items())


def test_an_equal_head_of_a_tied_model_is_stored_once(tmp_path: Path) -> None:
    tensors = {EMBED: rand(8, 8), HEAD: rand(8, 8)}
    checkpoint, notes = write(tmp_path, source(tmp_path, tensors, tie_word_embeddings=True))
    assert checkpoint.names() == (EMBED,)
    assert checkpoint.config["tie_word_embeddings"] is True
    assert notes == ["lm_head equals the embedding and is tied to it: stored once"]


def test_an_equal_head_of_an_untied_model_is_kept(tmp_path: Path) -> None:
    checkpoint, _ = write(tmp_path, source(tmp_path, {EMBED: rand(8, 8), HEAD: rand(8, 8)}))
    assert set(checkpoint.names()) == {EMBED, HEAD}


def test_a_different_head_unties_the_config(tmp_path: Path) -> None:
    tensors = {EMBED: rand(8, 8), HEAD: rand(8, 8, seed=1)}
    checkpoint, notes = write(tmp_path, source(tmp_path, tensors, tie_word_embeddings=True))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert torch.equal(checkpoint.tensor(HEAD), tensors[HEAD])
    assert notes == ["lm_head differs from the embedding: tie_word_embeddings set to false"]


def test_a_missing_head_ties_the_config(tmp_path: Path) -> None:
    checkpoint, notes = write(tmp_path, source(tmp_path, {EMBED: rand(8, 8)}))
    assert checkpoint.config["tie_word_embeddings"] is True
    assert notes == ["no lm_head is stored: tie_word_embeddings set to true"]


@pytest.mark.parametrize("tied", [True, False])
def test_both_kinds_reload_in_transformers(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, "tie_word_embeddings": tied})).eval()
    model.save_pretrained(tmp_path / "source")
    write(tmp_path, tmp_path / "source")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_named(value: float, tmp_path: Path) -> None:
    bad = rand(8, 8)
    bad[2, 3] = bad[4, 4] = value
    error = refused(tmp_path, source(tmp_path, {EMBED: rand(8, 8), UP: bad}))
    assert error.code == "tensor-not-finite"
    assert UP in error.what
    assert error.why == "2 of 64 values"


def test_nan_in_fp8_is_found(tmp_path: Path) -> None:
    raw = torch.zeros(8, 8).to(torch.float8_e4m3fn).view(torch.uint8)
    raw[0, 0] = 0x7F
    error = refused(tmp_path, source(tmp_path, {EMBED: rand(8, 8), UP: raw.view(torch.float8_e4m3fn)}))
    assert error.code == "tensor-not-finite"


def test_mixed_dtypes_are_refused_and_made_one(tmp_path: Path) -> None:
    folder = source(tmp_path, {EMBED: rand(8, 8), UP: rand(8, 8, dtype=torch.float32)})
    error = refused(tmp_path, folder)
    assert error.code == "dtypes-mixed"
    assert f"{EMBED} is bfloat16" in error.why
    assert f"{UP} is float32" in error.why
    checkpoint, _ = write(tmp_path, folder, dtype="bfloat16")
    assert {checkpoint.tensor(n).dtype for n in checkpoint.names()} == {torch.bfloat16}
    assert checkpoint.config["torch_dtype"] == "bfloat16"


def test_routers_norms_and_integers_may_have_their_own_dtype(tmp_path: Path) -> None:
    tensors = {
        EMBED: rand(8, 8),
        "model.layers.0.mlp.gate.weight": rand(4, 8, dtype=torch.float32),
        "model.norm.weight": rand(8, dtype=torch.float32),
        "model.layers.0.positions": torch.arange(8).reshape(2, 4),
    }
    checkpoint, _ = write(tmp_path, source(tmp_path, tensors))
    assert all(torch.equal(checkpoint.tensor(n), t) for n, t in tensors.items())


def test_a_cast_that_overflows_is_refused(tmp_path: Path) -> None:
    big = rand(8, 8)
    big[0, 0] = 1e6
    error = refused(tmp_path, source(tmp_path, {EMBED: rand(8, 8), UP: big}), dtype="float16")
    assert error.code == "tensor-not-finite"
    assert error.why == "1 of 64 values as float16"


def test_stated_architecture_has_to_agree(tmp_path: Path) -> None:
    folder = source(tmp_path, {EMBED: rand(8, 8)})
    error = refused(tmp_path, folder, architecture="Qwen2ForCausalLM")
    assert error.code == "architecture-disagrees"
    assert "--architecture is Qwen2ForCausalLM, its config says LlamaForCausalLM" in error.why
    write(tmp_path, folder, architecture="LlamaForCausalLM")


def test_a_config_without_architectures_can_be_told(tmp_path: Path) -> None:
    folder = source(tmp_path, {EMBED: rand(8, 8)}, architectures=None)
    assert refused(tmp_path, folder).code == "no-architecture"
    checkpoint, _ = write(tmp_path, folder, architecture="LlamaForCausalLM")
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]


def test_a_folders_name_says_nothing(tmp_path: Path) -> None:
    folder = source(tmp_path, {EMBED: rand(8, 8)}, architectures=["NopeForCausalLM"])
    named = folder.rename(tmp_path / "Llama-3-8B")
    (named / "model.safetensors").unlink()
    error = refused(tmp_path, named)
    assert error.code == "unknown-architecture"
    assert "InternLM2ForCausalLM" in error.why
    assert "LlamaForCausalLM" in error.why


def test_stated_format_has_to_agree(tmp_path: Path) -> None:
    folder = source(tmp_path, {EMBED: rand(8, 8)})
    error = refused(tmp_path, folder, source_format="gguf")
    assert error.code == "source-format-disagrees"
    assert error.why == "stated is gguf, found is safetensors"
    assert refused(tmp_path, folder, source_format="ggfu").hint == "did you mean 'gguf'?"
    torch.save({EMBED: rand(8, 8, seed=5)}, folder / "pytorch_model.bin")
    checkpoint, _ = write(tmp_path, folder, source_format="bin")
    assert torch.equal(checkpoint.tensor(EMBED), rand(8, 8, seed=5))


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    assert refused(tmp_path, tmp_path / "nothing").code == "checkpoint-missing"


def test_an_already_quantised_checkpoint_passes_through(tmp_path: Path) -> None:
    from delivery.formats import awq
    from delivery.qtensor import QTensor

    q = QTensor(
        torch.randint(0, 16, (8, 8), dtype=torch.uint8),
        torch.full((8, 1), 0.5, dtype=torch.float16),
        torch.full((8, 1), 7, dtype=torch.uint8),
        -1,
        4,
    )
    prefix = UP.removesuffix(".weight")
    entry = awq.quantization_config({prefix: q})
    tensors = {EMBED: rand(8, 8), HEAD: rand(8, 8, seed=1), **awq.pack(prefix, q)}
    checkpoint, _ = write(tmp_path, source(tmp_path, tensors, quantization_config=entry))
    assert checkpoint.quantization == entry
    assert torch.equal(checkpoint.weight(prefix).dequantize(), q.dequantize())
    assert torch.equal(checkpoint.weight("lm_head"), tensors[HEAD])
