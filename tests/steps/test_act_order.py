"""Groups along GPTQ's own order of columns: what an export says of them, and which ones cannot hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantize_fixtures import WORDS, context, write_checkpoint

from delivery.checkpoint import Checkpoint
from delivery.errors import UsageError
from delivery.qtensor import QTensor
from delivery.quantization import load_scheme, scheme_names
from delivery.steps.calibrate import Calibrate
from delivery.steps.quantize import Quantize

REORDERING = [
    {"scheme": "gptq-w4a16"},
    {"scheme": "awq-w4a16", "rounding": "gptq"},
    {"scheme": "smoothquant-w4a16", "rounding": "gptq"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m", num_hidden_layers=1)


@pytest.fixture(scope="module")
def calibration(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cal")
    corpus = folder / "own.jsonl"
    corpus.write_text("\n".join(json.dumps({"text": f"{i * 7}: {WORDS}" * 4}) for i in range(60)))
    ctx = context(folder, "cal", checkpoint=model)
    Calibrate(checkpoint="m", corpus=str(corpus), samples=8, sequence_length=48).run(ctx)
    return ctx.out


def quantize(folder: Path, model: Path, calibration: Path, **settings: Any) -> Path:
    ctx = context(folder, "q", checkpoint=model, calibration=calibration)
    Quantize(checkpoint="m", **{"group_size": "32", **settings}).run(ctx)
    return ctx.out


@pytest.mark.parametrize("settings", REORDERING)
@pytest.mark.parametrize("act_order", ["off", "static", "group"])
def test_a_gptq_config_says_whether_groups_are_reordered(
    settings: dict[str, str], act_order: str, model: Path, calibration: Path, tmp_path: Path
) -> None:
    out = quantize(tmp_path, model, calibration, format="gptq", act_order=act_order, **settings)
    stated = json.loads((out / "config.json").read_text())["quantization_config"]["desc_act"]
    groups = Checkpoint.open(out).tensor("model.layers.0.mlp.down_proj.g_idx")
    consecutive = torch.arange(len(groups), dtype=groups.dtype) // 32
    # Loaders leave g_idx aside where desc_act is false.
    assert stated == (act_order == "group") == (not torch.equal(groups, consecutive))


@pytest.mark.parametrize("settings", REORDERING)
@pytest.mark.parametrize("form", ["awq", "compressed-tensors"])
def test_formats_without_reordered_groups_refuse_them(
    settings: dict[str, str], form: str, model: Path, calibration: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="reordered"):
        quantize(tmp_path, model, calibration, format=form, act_order="group", **settings)
    assert not list((tmp_path / "q").glob("*.safetensors"))


@pytest.mark.parametrize("form", ["gptq", "deliver"])
def test_one_group_over_all_features_has_no_order(
    form: str, model: Path, calibration: Path, tmp_path: Path
) -> None:
    settings = {"scheme": "gptq-w4a16", "act_order": "group", "group_size": "-1", "format": form}
    out = quantize(tmp_path, model, calibration, **settings)
    weight = Checkpoint.open(out).weight("model.layers.0.mlp.down_proj")
    assert isinstance(weight, QTensor)
    assert weight.g_idx is None


@pytest.mark.parametrize("name", scheme_names())
def test_rounding_to_nearest_keeps_the_order(
    name: str, model: Path, calibration: Path, tmp_path: Path
) -> None:
    if name == "gptq-w4a16":
        return
    out = quantize(tmp_path, model, calibration, scheme=name, act_order="group")
    weight = Checkpoint.open(out).weight("model.layers.0.self_attn.q_proj")
    assert isinstance(weight, QTensor)
    assert weight.g_idx is None
    assert load_scheme(name).storage.bits == weight.bits
