"""GGUF files become the checkpoints that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import gguf_samples as samples
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_samples import byte_level

from delivery.checkpoint import Checkpoint
from delivery.checkpoint.convert import convert, open_source
from delivery.checkpoint.gguf_file import GgufFile
from delivery.checkpoint.gguf_source import GgufSource
from delivery.engine import LLM
from delivery.errors import DataError, UsageError

IDS = torch.arange(3, 43)[None]
FREE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "llama", {}),
    "llama tied": ("Llama", "llama", {"tie_word_embeddings": True, "rope_theta": 50000.0}),
    "llama wide heads": ("Llama", "llama", {"head_dim": 32}),
    "qwen2": ("Qwen2", "qwen2", {}),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 16}),
    "gemma": ("Gemma", "gemma", {"tie_word_embeddings": True, "head_dim": 32}),
    "phi3": ("Phi3", "phi3", FREE),
}


def to_checkpoint(file: Path, out: Path, dtype: str = "auto") -> Checkpoint:
    convert(open_source(file, dtype=dtype), out, 10**9, lambda done: None)
    return Checkpoint.open(out)


def engine_logits(directory: Path) -> torch.Tensor:
    with LLM(directory, block_size=8, max_num_batched_tokens=16) as llm:
        return torch.cat(list(llm.logits(IDS[0].tolist())))[None]


@pytest.mark.parametrize("name", MODELS)
def test_weights_config_and_logits_come_back(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    family, architecture, changes = MODELS[name]
    model = samples.tiny(family, **changes)
    file = samples.write(tmp_path / "m.gguf", model, architecture, tokenizer=byte_level())
    checkpoint = to_checkpoint(file, tmp_path / "out")
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    assert set(checkpoint.names()) == set(state)
    outline = open_source(file).outline()
    assert outline is not None
    assert {n: outline.shape(n) for n in outline.names()} == {n: checkpoint.shape(n) for n in state}
    assert outline.size_bytes() == checkpoint.size_bytes()
    for tensor_name, values in state.items():
        exact = not (family == "Gemma" and "norm" in tensor_name)
        torch.testing.assert_close(checkpoint.tensor(tensor_name), values, rtol=0, atol=0 if exact else 1e-6)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        expected = model(IDS).logits
        torch.testing.assert_close(loaded(IDS).logits, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(engine_logits(tmp_path / "out"), expected, rtol=0, atol=1e-4)


def test_gemma2_and_gemma3_norms_windows_and_caps(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    def gemma2(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(8)
        writer.add_attn_logit_softcapping(20.0)
        writer.add_final_logit_softcapping(10.0)

    common = {"tie_word_embeddings": True, "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32}
    two = samples.tiny("Gemma2", attn_logit_softcapping=20.0, final_logit_softcapping=10.0, **common)
    three = samples.tiny("Gemma3", num_hidden_layers=7, rope_theta=1_000_000.0, **common)
    cases = [("gemma2", two, gemma2), ("gemma3", three, lambda w: w.add_sliding_window(8))]
    for architecture, model, extra in cases:
        file = samples.write(
            tmp_path / f"{architecture}.gguf", model, architecture, tokenizer=byte_level(), extra=extra
        )
        to_checkpoint(file, tmp_path / architecture)
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / architecture, dtype=torch.float32, attn_implementation="eager"
        )
        model.set_attn_implementation("eager")
        with torch.no_grad():
            expected = model(IDS).logits
            torch.testing.assert_close(loaded(IDS).logits, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(engine_logits(tmp_path / architecture), expected, rtol=0, atol=1e-4)


def test_experts_route_as_before(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(5)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(32)

    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    cases = [
        ("qwen3moe", samples.tiny("Qwen3Moe", head_dim=16, **sizes)),
        ("llama", samples.tiny("Mixtral", num_local_experts=5, num_experts_per_tok=2)),
    ]
    for architecture, model in cases:
        file = samples.write(
            tmp_path / f"{architecture}.gguf", model, architecture, tokenizer=byte_level(), extra=extra
        )
        to_checkpoint(file, tmp_path / architecture)
        with torch.no_grad():
            expected = model(IDS).logits
        torch.testing.assert_close(engine_logits(tmp_path / architecture), expected, rtol=0, atol=1e-4)


def llama3_factors(config: Any) -> np.ndarray:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(0, 16, 2) / 16)
    return (plain / scaled).numpy().astype(np.float32)


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = samples.tiny("Llama", rope_parameters=scaling, max_position_embeddings=131072)
    factors = llama3_factors(model.config)
    assert factors.max() == pytest.approx(8.0)
    file = samples.write(
        tmp_path / "m.gguf",
        model,
        "llama",
        tokenizer=byte_level(),
        extra=lambda w: w.add_tensor("rope_freqs.weight", factors),
    )
    config = to_checkpoint(file, tmp_path / "out").config
    assert config["rope_scaling"] == {k: v for k, v in scaling.items() if k != "rope_theta"}
    odd = samples.write(
        tmp_path / "odd.gguf",
        model,
        "llama",
        tokenizer=byte_level(),
        extra=lambda w: w.add_tensor("rope_freqs.weight", factors**0.5 + 1),
    )
    with pytest.raises(DataError, match="rope factors of this GGUF file are not Llama 3's"):
        open_source(odd)


def test_yarn_and_longrope_metadata(tmp_path: Path) -> None:
    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    model = samples.tiny("Qwen2")
    file = samples.write(tmp_path / "y.gguf", model, "qwen2", tokenizer=byte_level(), extra=yarn)
    assert GgufSource(file).config["rope_scaling"] == {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }

    def longrope(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_dimension_count(12)
        writer.add_rope_scaling_orig_ctx_len(16)
        writer.add_tensor("rope_factors_long.weight", np.full(6, 2.5, np.float32))
        writer.add_tensor("rope_factors_short.weight", np.ones(6, np.float32))

    phi = samples.tiny("Phi3", **FREE)
    file = samples.write(tmp_path / "p.gguf", phi, "phi3", tokenizer=byte_level(), extra=longrope)
    config = GgufSource(file).config
    assert config["rope_scaling"]["long_factor"] == [2.5] * 6
    assert config["partial_rotary_factor"] == 0.75
    assert config["original_max_position_embeddings"] == 16


def test_experts_of_qwen3_moe_and_mixtral_become_single_tensors(tmp_path: Path) -> None:
    for architecture, folder, members in (
        ("qwen3moe", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
        ("llama", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    ):
        writer = gguf.GGUFWriter(tmp_path / f"{architecture}.gguf", architecture)
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(48)
        writer.add_expert_feed_forward_length(48)
        writer.add_head_count(2)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        rng = np.random.default_rng(0)
        shapes = {"gate": (4, 48, 32), "up": (4, 48, 32), "down": (4, 32, 48)}
        experts = {m: rng.standard_normal(shape).astype(np.float32) for m, shape in shapes.items()}
        for name, values in experts.items():
            writer.add_tensor(f"blk.0.ffn_{name}_exps.weight", values)
        writer.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((4, 32), np.float32))
        writer.add_tensor("token_embd.weight", np.ones((8, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        source = GgufSource(tmp_path / f"{architecture}.gguf")
        for name, member in zip(("gate", "up", "down"), members, strict=True):
            for index in range(4):
                got = source.tensor(f"model.layers.0.{folder}.{index}.{member}.weight")
                np.testing.assert_array_equal(got.numpy(), experts[name][index])


QUANTISED = [
    kind
    for kind in gguf.GGMLQuantizationType
    if kind in gguf.quants._type_traits and kind != gguf.GGMLQuantizationType.BF16
]


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda k: k.name)
def test_every_type_that_the_package_dequantises(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 6, 2 * max(block, 32)
    raw = np.random.default_rng(3).integers(0, 60, (rows, columns // block * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(tmp_path / "m.gguf") as file:
        tensor = file.tensors["blk.0.ffn_up.weight"]
        assert (tensor.kind, tensor.shape) == (kind.name, (rows, columns))
        values = file.read("blk.0.ffn_up.weight")
    np.testing.assert_array_equal(values, gguf.dequantize(raw, kind))
    assert np.ptp(values) > 0


def test_quantised_weights_are_bfloat16_far_below_the_error_of_quantising(tmp_path: Path) -> None:
    model = samples.tiny("Llama")
    kind = gguf.GGMLQuantizationType.Q4_1
    file = samples.write(tmp_path / "m.gguf", model, "llama", tokenizer=byte_level(), kind=kind)
    checkpoint = to_checkpoint(file, tmp_path / "out")
    assert checkpoint.config["torch_dtype"] == "bfloat16"
    exact = to_checkpoint(file, tmp_path / "exact", dtype="float32")
    name = "model.layers.1.mlp.up_proj.weight"
    full, stored = exact.tensor(name), checkpoint.tensor(name).float()
    rounding = (stored - full).norm()
    quantising = (full - model.state_dict()[name]).norm()
    assert 0 < rounding < quantising / 15


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (gguf.GGMLQuantizationType.F16, "float16"),
        (gguf.GGMLQuantizationType.BF16, "bfloat16"),
        (gguf.GGMLQuantizationType.F32, "float32"),
    ],
)
def test_plain_weights_keep_their_dtype(kind: gguf.GGMLQuantizationType, dtype: str, tmp_path: Path) -> None:
    model = samples.tiny("Llama").to(getattr(torch, dtype))
    file = samples.write(tmp_path / "m.gguf", model, "llama", tokenizer=byte_level(), kind=kind)
    checkpoint = to_checkpoint(file, tmp_path / "out")
    assert checkpoint.config["torch_dtype"] == dtype
    for name, values in model.state_dict().items():
        assert torch.equal(checkpoint.tensor(name), values)


def test_a_folder_with_one_gguf_file_and_one_with_two(tmp_path: Path) -> None:
    samples.write(tmp_path / "a.gguf", samples.tiny("Llama"), "llama", tokenizer=byte_level())
    assert open_source(tmp_path).config["model_type"] == "llama"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="holds 2 GGUF files"):
        open_source(tmp_path)


def test_unknown_architecture_and_tensor(tmp_path: Path) -> None:
    model = samples.tiny("Llama")
    file = samples.write(tmp_path / "m.gguf", model, "mamba", tokenizer=byte_level())
    with pytest.raises(DataError, match="GGUF architecture 'mamba' is not supported") as caught:
        open_source(file)
    assert "llama" in caught.value.why
    file = samples.write(
        tmp_path / "n.gguf",
        model,
        "llama",
        tokenizer=byte_level(),
        extra=lambda w: w.add_tensor("blk.0.surprise.weight", np.ones(3, np.float32)),
    )
    with pytest.raises(DataError, match=r"unexpected tensor 'blk\.0\.surprise\.weight'"):
        open_source(file)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return samples.write(path, samples.tiny("Llama"), "llama", tokenizer=byte_level()).read_bytes()


def test_truncated_file_is_named(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:-5000])
    with pytest.raises(DataError, match=r"cut\.gguf is truncated") as caught:
        GgufFile(path)
    assert caught.value.code == "shard-truncated"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_headers_are_one_error(whole: bytes, tmp_path_factory: Any, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    raw = bytearray(whole[: data.draw(st.integers(0, 20_000))])
    for _ in range(data.draw(st.integers(0, 6))):
        if raw:
            raw[data.draw(st.integers(0, min(len(raw), 4000) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    with pytest.raises(DataError, match="fuzzed") as caught:
        GgufFile(path)
    assert caught.value.code in {"gguf-damaged", "shard-truncated"}


def test_counts_beyond_the_file_are_refused_without_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    header = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    key = (1).to_bytes(8, "little") + b"k"
    huge = (9).to_bytes(4, "little") + (8).to_bytes(4, "little") + (2**40).to_bytes(8, "little")
    path.write_bytes(header + key + huge)
    with pytest.raises(DataError, match="cannot be read as GGUF") as caught:
        GgufFile(path)
    assert caught.value.why == "an array claims 1099511627776 entries"
    nested = (9).to_bytes(4, "little") + ((9).to_bytes(4, "little") + (1).to_bytes(8, "little")) * 5000
    path.write_bytes(header + key + nested)
    with pytest.raises(DataError, match="cannot be read as GGUF"):
        GgufFile(path)
