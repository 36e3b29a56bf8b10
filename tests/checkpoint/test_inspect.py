"""`describe` says what a checkpoint is, of every form, from configs and headers alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf_samples as samples
import pytest
import tiny_families
import torch
from safetensors.torch import save_file
from tiny_checkpoint import write_tokenizer
from tokenizer_samples import byte_level

from delivery.checkpoint import describe
from delivery.checkpoint.engines import verdicts
from delivery.checkpoint.inspect_text import as_lines
from delivery.errors import DataError
from delivery.formats import awq, compressed_tensors, fp8, gptq, smooth_quant
from delivery.qtensor import QTensor

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rope_theta": 5e5,
}
PREFIX = "model.layers.0.mlp.up_proj"


def write(path: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(tensors, path / "model.safetensors")
    write_tokenizer(path)
    return path


def four_bit() -> QTensor:
    return QTensor(
        torch.zeros(128, 128, dtype=torch.int8), torch.ones(128, 4, dtype=torch.float16), None, 32, 4
    )


def eight_bit(block: bool = False) -> QTensor:
    dtype = torch.float8_e4m3fn if block else torch.int8
    scale = torch.ones(1, 1) if block else torch.ones(128, 1)
    qdata = torch.zeros(128, 128).to(dtype)
    return QTensor(qdata, scale, None, -1, 8, act_dtype=dtype, block_size=128 if block else None)


def test_plain_checkpoint(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.zeros(259, 128, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(128),
    }
    write(tmp_path, tensors)
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Model\n")
    facts = describe(tmp_path)
    expected = {
        "architecture": "LlamaForCausalLM",
        "family": "llama",
        "format": "safetensors",
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "context_tokens": 512,
        "rope_theta": 5e5,
        "tied_embeddings": True,
        "kv_bytes_per_token": 3 * 2 * 2 * 32 * 2,
        "parameters": 259 * 128 + 128,
        "size_bytes": 259 * 128 * 2 + 512,
        "quantization": None,
        "license": "apache-2.0",
    }
    assert {k: facts[k] for k in expected} == expected
    assert facts["dtypes"] == {
        "BF16": {"tensors": 1, "bytes": 259 * 128 * 2},
        "F32": {"tensors": 1, "bytes": 512},
    }
    assert facts["bits_per_weight"] == pytest.approx(16.06, abs=0.01)
    assert facts["tokenizer"] == {"kind": "BPE", "vocab_size": 259, "chat_template": True}
    assert all(e["loads"] for e in facts["engines"].values())
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize(
    ("module", "q", "bits", "refusing"),
    [
        (awq, four_bit(), 4, set()),
        (gptq, four_bit(), 4, set()),
        (compressed_tensors, four_bit(), 4, {"lmdeploy"}),
        (compressed_tensors, eight_bit(), 8, {"lmdeploy"}),
        (smooth_quant, eight_bit(), 8, {"vllm", "sglang", "transformers"}),
        (fp8, eight_bit(block=True), 8, set()),
    ],
)
def test_quantised_checkpoint(
    module: object, q: QTensor, bits: int, refusing: set[str], tmp_path: Path
) -> None:
    entry = module.quantization_config({PREFIX: q, "model.layers.0.mlp.gate_proj": None})
    facts = describe(write(tmp_path, module.pack(PREFIX, q), quantization_config=entry))
    assert facts["parameters"] == 128 * 128
    assert facts["quantization"]["bits"] == bits
    assert bits <= facts["bits_per_weight"] < bits + 1.3
    assert {n for n, e in facts["engines"].items() if not e["loads"]} == refusing
    for name in refusing:
        assert f"it does not read {entry['quant_method']}" in facts["engines"][name]["why_not"]


def test_transformers_needs_a_word_for_zero_points(tmp_path: Path) -> None:
    q = four_bit()
    q = QTensor(q.qdata.to(torch.uint8), q.scale, torch.ones(128, 4, dtype=torch.uint8), 32, 4)
    entry = compressed_tensors.quantization_config({PREFIX: q})
    facts = describe(write(tmp_path, compressed_tensors.pack(PREFIX, q), quantization_config=entry))
    assert "dequantize=True" in facts["engines"]["transformers"]["needs"]


def test_why_not_ours(tmp_path: Path) -> None:
    tensors = {"x": torch.ones(2)}
    unknown = describe(write(tmp_path, tensors, architectures=["RwkvForCausalLM"]))
    assert "RwkvForCausalLM" in unknown["engines"]["deliver"]["why_not"]
    assert unknown["family"] is None
    assert unknown["layers"] == 3
    write(tmp_path, tensors, quantization_config={"quant_method": "bitsandbytes"})
    assert "'bitsandbytes' cannot be read" in describe(tmp_path)["engines"]["deliver"]["why_not"]
    write(tmp_path, tensors, auto_map={"AutoModel": "x.Y"})
    assert "--trust-remote-code" in describe(tmp_path)["engines"]["vllm"]["needs"]
    (tmp_path / "tokenizer.json").unlink()
    facts = describe(tmp_path)
    assert facts["tokenizer"] is None
    assert facts["engines"]["deliver"]["why_not"] == "it has no tokenizer"


def test_bin_directory_and_licence_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"x": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "LICENSE").write_text("\n   MIT License\n\nCopyright\n")
    facts = describe(tmp_path)
    assert facts["format"] == "bin"
    assert facts["size_bytes"] == (tmp_path / "pytorch_model.bin").stat().st_size
    assert facts["parameters"] is None
    assert facts["license"] == "MIT License"
    assert "deliver convert" in facts["engines"]["deliver"]["why_not"]


def test_gguf_file(tmp_path: Path) -> None:
    file = samples.write(
        tmp_path / "m.gguf",
        samples.tiny("Llama"),
        "llama",
        tokenizer=byte_level(),
        extra=lambda w: w.add_license("mit"),
    )
    for place in (file, tmp_path):
        facts = describe(place)
        assert (facts["format"], facts["architecture"]) == ("gguf", "LlamaForCausalLM")
        assert facts["license"] == "mit"
        assert facts["parameters"] == sum(p.numel() for p in samples.tiny("Llama").parameters())
        assert "deliver convert" in facts["engines"]["deliver"]["why_not"]


def test_a_damaged_directory_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"x": torch.ones(20)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"model\.safetensors is truncated"):
        describe(tmp_path)


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    write(tmp_path, {"x": torch.ones(2)}, quantization_config={"quant_method": "awq", "bits": 4})
    code = (
        "import sys; from delivery.checkpoint import describe; describe(sys.argv[1]);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


def test_lines_for_a_person(tmp_path: Path) -> None:
    q = four_bit()
    entry = compressed_tensors.quantization_config({PREFIX: q, "model.layers.0.mlp.gate_proj": None}, "fp8")
    facts = describe(write(tmp_path, compressed_tensors.pack(PREFIX, q), quantization_config=entry))
    assert as_lines(facts) == [
        "model:      LlamaForCausalLM (llama), 16.4k parameters",
        "shape:      3 layers, 128 hidden, 4 heads, 2 KV heads, 259 tokens in the vocabulary,"
        " tied embeddings",
        "context:    512 tokens, 768 B of KV cache each",
        "weights:    9.23 kB of safetensors, 4.51 bits per parameter, I32 89 %, F16 11 %, I64 0 %",
        "quantised:  compressed-tensors, pack-quantized, 4 bits, group size 32, KV cache of 8 bits,"
        " 2 layers left unquantised",
        "tokenizer:  BPE, 259 tokens, with chat template",
        "loads in:   deliver: yes",
        "            vllm: yes",
        "            sglang: yes",
        "            lmdeploy: no, it does not read compressed-tensors;"
        " it reads awq, fp8, gptq, smooth_quant",
        "            transformers: yes, needs the package compressed-tensors",
    ]
    plain = write(tmp_path, {"x": torch.ones(2)}, architectures=["RwkvForCausalLM"])
    (plain / "tokenizer.json").unlink()
    lines = as_lines(describe(plain))
    assert "quantised:  no" in lines
    assert "tokenizer:  none" in lines
    assert any(line.startswith("loads in:   deliver: no, ") for line in lines)


def test_experts_window_and_rotary_are_told(tmp_path: Path) -> None:
    tiny_families.build("qwen2-moe").save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    facts = describe(tmp_path)
    assert facts["experts"] == {"count": 6, "per_token": 3}
    routed = 2 * 6 * 3 * 32 * 64  # two layers of six experts
    assert facts["parameters"] - facts["active_parameters"] == routed // 2
    text = "\n".join(as_lines(facts))
    assert "parameters (125k of them active)" in text
    assert "3 of 6 experts a token" in text
    tiny_families.build("phi3-longrope", sliding_window=31).save_pretrained(tmp_path / "phi")
    text = "\n".join(as_lines(describe(tmp_path / "phi")))
    assert "window of 31, longrope rotary" in text


@pytest.mark.parametrize(
    ("architecture", "engine"), [("GraniteForCausalLM", "lmdeploy"), ("ChatGLMModel", "transformers")]
)
def test_an_engine_without_a_class_says_so(architecture: str, engine: str) -> None:
    verdict = verdicts({"architectures": [architecture]}, None)[engine]
    assert verdict == {"loads": False, "why_not": f"it has no class {architecture}", "needs": None}
    assert verdicts({"architectures": [architecture]}, None)["vllm"]["loads"]


def test_what_has_to_be_converted_says_how(tmp_path: Path) -> None:
    write(
        tmp_path, {"model.tok_embeddings.weight": torch.zeros(8, 8)}, architectures=["InternLM2ForCausalLM"]
    )
    ours = describe(tmp_path)["engines"]["deliver"]
    assert ours["why_not"] == "InternLM2ForCausalLM has to be converted first"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {"architectures": 3}),
        ("config.json", {**CONFIG, "quantization_config": {"quant_method": ["awq"]}}),
        ("config.json", {**CONFIG, "quantization_config": {"config_groups": ["group_0"]}}),
        ("tokenizer.json", {"model": "BPE"}),
    ],
)
def test_what_is_of_the_wrong_kind_is_named(tmp_path: Path, file: str, content: object) -> None:
    path = write(tmp_path, {f"{PREFIX}.weight": torch.zeros(128, 128)})
    (path / file).write_text(json.dumps(content))
    with pytest.raises(DataError, match="says something of the wrong kind") as caught:
        describe(path)
    assert caught.value.code == "config-invalid"
