"""Before any weight is read: names, group sizes, hardware, predicted memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tiny_blocks import HF

from delivery.errors import EnvironmentLacking, UsageError
from delivery.model import load_config
from delivery.quantization import load_scheme, scheme_names
from delivery.quantization.group_size import (
    GroupSizes,
    common_group_size,
    fit_group_size,
    parse_group_size,
)
from delivery.quantization.hardware import check_hardware, why_not_hardware
from delivery.quantization.inputs import input_groups, is_router, kind_of
from delivery.quantization.kv import kv_scale
from delivery.quantization.memory import gigabytes, predict_peak_bytes
from delivery.quantization.options import Options
from delivery.quantization.patterns import matches, parse_recipe


def test_schemes_are_found_by_file_name_without_torch() -> None:
    code = (
        "import sys; from delivery.quantization import scheme_names; print(*scheme_names());"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert set(done.stdout.split()) >= {
        "rtn-w4a16",
        "awq-w4a16",
        "gptq-w4a16",
        "smoothquant-int8",
        "smoothquant-fp8",
        "fp8-dynamic",
        "fp8-static",
        "fp8-block",
        "fp8-e5m2",
        "smoothquant-w4a16",
        "w8a16",
    }


@pytest.mark.parametrize("name", scheme_names())
def test_a_scheme_is_what_its_file_says(name: str) -> None:
    scheme = load_scheme(name)
    assert scheme.name == name
    assert scheme.summary
    assert scheme.formats
    prototype = scheme.storage.prototype((256, 256), 64 if scheme.grouped else -1, symmetric=True)
    assert prototype.qdata.device.type == "meta"
    assert prototype.bits == scheme.storage.bits
    assert scheme.needs(Options(clip=True, search_scale=True)) >= scheme.needs(Options())


def test_an_unknown_scheme_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"no scheme 'awq'[\s\S]*awq-w4a16"):
        load_scheme("awq")


@pytest.mark.parametrize(
    ("wanted", "columns", "shards", "size"),
    [
        (128, 4096, 1, 128),
        (128, 576, 1, 64),
        (128, 29568, 1, 128),
        (128, 29568, 2, 64),
        (64, 1536, 1, 64),
        (128, 48, 1, 16),
        (128, 40, 1, None),
        (128, 4095, 3, None),
        (128, 4096, 3, None),
        (-1, 40, 1, -1),
        (96, 960, 1, 96),
    ],
)
def test_the_largest_usual_size_that_divides(
    wanted: int, columns: int, shards: int, size: int | None
) -> None:
    assert fit_group_size(wanted, columns, shards) == size


def test_one_size_for_a_whole_model() -> None:
    assert common_group_size(128, [576, 576, 576, 1536]) == 64
    assert common_group_size(128, [4096, 14336]) == 128
    assert common_group_size(128, [4096, 14336, 96]) == 32
    assert common_group_size(-1, [96]) == -1


def test_group_sizes_as_written() -> None:
    assert parse_group_size("64") == GroupSizes(64, 64)
    assert parse_group_size(128).uniform
    assert parse_group_size("attention=64,mlp=128") == GroupSizes(64, 128)
    assert parse_group_size("attention=64,mlp=128,embedding=32") == GroupSizes(64, 128, 32)
    for bad in ("8", "attention", "layer=3", "attention=x", "0"):
        with pytest.raises(UsageError, match="is not understood"):
            parse_group_size(bad)


def test_recipes_as_written() -> None:
    rules = parse_recipe(" *.down_proj=w8a16 , model.layers.0.*=skip ")
    assert rules == {"*.down_proj": "w8a16", "model.layers.0.*": "skip"}
    assert matches("*.down_proj", "down_proj", "model.layers.3.mlp.down_proj")
    assert matches("down_proj", "down_proj", "model.layers.3.mlp.down_proj")
    assert not matches("layers.3.*", "down_proj", "model.layers.3.mlp.down_proj")
    with pytest.raises(UsageError, match=r"'=skip' in the recipe is not understood"):
        parse_recipe("=skip")


def test_layers_on_one_input() -> None:
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    groups = {g.key: g for g in input_groups(names)}
    assert {k: (g.linears, g.norm, g.rows_of) for k, g in groups.items()} == {
        "q_proj": (("q_proj", "k_proj", "v_proj"), "input_norm", None),
        "o_proj": (("o_proj",), None, "v_proj"),
        "gate_proj": (("gate_proj", "up_proj"), "pre_mlp_norm", None),
        "down_proj": (("down_proj",), None, "up_proj"),
    }
    unknown = input_groups(["strange_proj"])
    assert unknown[0].linears == ("strange_proj",)
    assert (unknown[0].norm, unknown[0].rows_of) == (None, None)
    assert kind_of("experts.1.up_proj") == "mlp"
    assert kind_of("o_proj") == "attention"
    assert is_router("router")


@pytest.mark.parametrize(
    ("scheme", "capability", "runs"),
    [
        ("fp8-dynamic", (8, 6), False),
        ("fp8-static", (8, 9), True),
        ("smoothquant-fp8", (9, 0), True),
        ("smoothquant-int8", (6, 1), False),
        ("smoothquant-int8", (7, 0), True),
        ("awq-w4a16", (7, 5), True),
    ],
)
def test_older_cards_are_refused_with_the_reason(
    scheme: str, capability: tuple[int, int], runs: bool
) -> None:
    storage = load_scheme(scheme).storage
    assert (why_not_hardware(storage, capability) is None) == runs
    if not runs:
        have = f"this GPU has sm{capability[0]}{capability[1]}"
        with pytest.raises(EnvironmentLacking, match=have):
            check_hardware([storage], capability)


def test_cache_scales() -> None:
    absmax = torch.tensor([3.0, 12.7])
    assert float(kv_scale(absmax, "int8")) == pytest.approx(0.1)
    assert float(kv_scale(absmax, "fp8")) == pytest.approx(12.7 / 448)
    assert float(kv_scale(torch.zeros(2), "int8")) == 1.0
    assert kv_scale(torch.zeros(0), "fp8").shape == (1,)


def test_predicted_memory_grows_with_what_is_held() -> None:
    llama = load_config(
        {
            **HF,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
        }
    )
    calibrate = predict_peak_bytes(llama, 128 * 512, 512, gram=False, device="cuda")
    quantize = predict_peak_bytes(llama, 128 * 512, 512, gram=True, device="cuda")
    more = predict_peak_bytes(llama, 256 * 512, 512, gram=True, device="cuda")
    assert 2e9 < calibrate < quantize < 20e9
    assert more - quantize == pytest.approx(128 * 512 * 4096 * 4)
    assert gigabytes(1.26e9) == "1.3 GB"
    assert gigabytes(None) == "unknown"


def test_experts_are_counted_at_their_own_size() -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "head_dim": 128}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    hf = {**HF, **sizes, **experts, "num_key_value_heads": 4, "architectures": ["Qwen3MoeForCausalLM"]}
    peak = predict_peak_bytes(load_config(hf), 128 * 512, 512, gram=False, device="cuda")
    block = 128 * 3 * 768 * 2048 * 4
    assert 2.5 * block < peak < 3.5 * block
