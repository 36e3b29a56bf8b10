"""The quantize step: every scheme in every format, what is refused, and how it goes on after a kill."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantize_fixtures import WORDS, Context, context, write_checkpoint

from delivery.artifact import Artifact
from delivery.checkpoint import Checkpoint
from delivery.errors import DataError, DeliverError, UsageError
from delivery.model import DenseAttention, block, embed, final_logits, load_block, load_config, load_ends
from delivery.qtensor import QTensor
from delivery.quantization import load_scheme, resume, scheme_names
from delivery.quantization.driver import Driver
from delivery.steps.calibrate import Calibrate
from delivery.steps.quantize import Quantize
from delivery.steps.step import Ahead


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def calibration(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(model, tmp_path_factory.mktemp("cal"))


def calibrated(model: Path, folder: Path) -> Path:
    corpus = folder / "own.jsonl"
    corpus.write_text("\n".join(json.dumps({"text": f"{i * 7}: {WORDS}" * 4}) for i in range(60)))
    ctx = context(folder, "cal", checkpoint=model)
    Calibrate(checkpoint="m", corpus=str(corpus), samples=8, sequence_length=48).run(ctx)
    return ctx.out


def quantize(folder: Path, model: Path, calibration: Path | None = None, **settings: Any) -> Context:
    inputs = {"checkpoint": model} | ({"calibration": calibration} if calibration else {})
    ctx = context(folder, "q", **inputs)
    Quantize(checkpoint="m", **{"group_size": "32", **settings}).run(ctx)
    return ctx


def logits(directory: Path) -> torch.Tensor:
    checkpoint = Checkpoint.open(directory)
    config = load_config(checkpoint.config)
    ends = load_ends(checkpoint, config, dtype=torch.float32)
    ids = torch.arange(40) * 7 % config.vocab_size
    hidden, positions, mixer = embed(config, ends.table, ids), torch.arange(40), DenseAttention()
    for layer in range(config.num_layers):
        weights = load_block(checkpoint, config, layer, dtype=torch.float32)
        hidden = block(config, layer, weights, hidden, positions, mixer)
    return final_logits(config, ends.norm, ends.head, hidden)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


PAIRS = [(scheme, form) for scheme in scheme_names() for form in load_scheme(scheme).formats]


@pytest.mark.parametrize(("scheme", "form"), PAIRS)
def test_every_scheme_in_every_format_reads_back_as_the_model(
    scheme: str, form: str, model: Path, calibration: Path, tmp_path: Path
) -> None:
    ctx = quantize(tmp_path, model, calibration, scheme=scheme, format=form)
    written = Checkpoint.open(ctx.out)
    weight = written.weight("model.layers.1.mlp.down_proj")
    assert isinstance(weight, QTensor)
    storage = load_scheme(scheme).storage
    assert (weight.bits, weight.act_dtype) == (storage.bits, storage.activation)
    # Random weights forgive less than trained ones; a layout read wrongly gives 1.4.
    assert distance(logits(ctx.out), logits(model)) < (0.3 if storage.bits == 4 or "e5m2" in scheme else 0.12)
    report = json.loads((ctx.out / "layers.json").read_text())
    assert len(report["layers"]) == 3 * 7
    assert all(0 < row["relative_error"] < 0.25 for row in report["layers"])
    assert all(math.isfinite(row["sqnr_db"]) and row["sqnr_db"] > 10 for row in report["layers"])
    assert ctx.metrics["bits_per_weight"] == pytest.approx(report["bits_per_weight"], abs=1e-3)
    assert storage.bits < ctx.metrics["bits_per_weight"] < storage.bits + 1.1
    assert (ctx.out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_formats_hold_the_same_weights(model: Path, calibration: Path, tmp_path: Path) -> None:
    outs = [
        quantize(tmp_path / form, model, calibration, scheme="awq-w4a16", format=form).out
        for form in ("awq", "compressed-tensors", "gptq")
    ]
    first, *others = (logits(out) for out in outs)
    for other in others:
        assert torch.equal(first, other)


@pytest.mark.parametrize("scheme", ["rtn-w4a16", "fp8-dynamic", "fp8-block", "w8a16", "fp8-e5m2"])
def test_schemes_that_look_at_weights_need_no_calibration(scheme: str, model: Path, tmp_path: Path) -> None:
    ctx = quantize(tmp_path, model, scheme=scheme)
    report = json.loads((ctx.out / "layers.json").read_text())
    assert {row["basis"] for row in report["layers"]} == {"weights"}
    assert distance(logits(ctx.out), logits(model)) < 0.3


@pytest.mark.parametrize("settings", [{"scheme": "awq-w4a16"}, {"scheme": "rtn-w4a16", "kv": "fp8"}])
def test_missing_calibration_is_said_with_the_command(settings: Any, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"needs calibration data[\s\S]*deliver calibrate --checkpoint DIR"):
        quantize(tmp_path, model, **{"format": "compressed-tensors", **settings})


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose MLP has 96 inner features."""
    return write_checkpoint(tmp_path_factory.mktemp("odd") / "m", intermediate_size=96)


def test_group_sizes_that_do_not_divide_are_chosen_per_layer_and_listed(odd: Path, tmp_path: Path) -> None:
    ctx = quantize(tmp_path, odd, scheme="rtn-w4a16", group_size="64", format="compressed-tensors")
    sizes = {
        row["canonical"]: row["group_size"]
        for row in json.loads((ctx.out / "layers.json").read_text())["layers"]
    }
    assert sizes["down_proj"] == 32  # 96 input features
    assert sizes["q_proj"] == 64
    assert "down_proj (layers 0 to 2): groups of 32 instead of 64 for 96 features" in ctx.texts("info")
    assert distance(logits(ctx.out), logits(odd)) < 0.3


def test_a_format_with_one_group_size_gets_one(odd: Path, tmp_path: Path) -> None:
    ctx = quantize(tmp_path, odd, scheme="rtn-w4a16", group_size="64", format="awq")
    assert Checkpoint.open(ctx.out).quantization["group_size"] == 32  # type: ignore[index]
    assert isinstance(Checkpoint.open(ctx.out).weight("model.layers.0.mlp.down_proj"), QTensor)


def test_group_sizes_by_kind_are_refused_where_the_format_knows_one(
    model: Path, calibration: Path, tmp_path: Path
) -> None:
    settings = {"scheme": "rtn-w4a16", "group_size": "attention=16,mlp=32"}
    with pytest.raises(UsageError, match=r"format awq cannot represent[\s\S]*one group size for all layers"):
        quantize(tmp_path / "a", model, calibration, **settings, format="awq")
    ctx = quantize(tmp_path / "c", model, calibration, **settings, format="compressed-tensors")
    assert distance(logits(ctx.out), logits(model)) < 0.3


def test_what_a_format_cannot_hold_is_said_before_work_begins(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a block was worked on")

    monkeypatch.setattr(Driver, "quantize_block", never)
    for scheme, form in (
        ("smoothquant-int8", "awq"),
        ("fp8-e5m2", "compressed-tensors"),
        ("fp8-block", "gptq"),
    ):
        with pytest.raises(UsageError, match=f"format {form} cannot represent what was requested"):
            quantize(tmp_path / form, model, scheme=scheme, format=form)


def test_recipes_and_skip_lists(model: Path, calibration: Path, tmp_path: Path) -> None:
    ctx = quantize(
        tmp_path,
        model,
        calibration,
        scheme="awq-w4a16",
        format="compressed-tensors",
        recipe="*.down_proj=w8a16,model.layers.0.*=skip",
        skip="o_proj",
    )
    written = Checkpoint.open(ctx.out)
    bits = {
        n: w.bits if isinstance(w := written.weight(f"model.layers.{n}"), QTensor) else 16
        for n in ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.down_proj", "1.self_attn.o_proj")
    }
    assert bits == {
        "0.self_attn.q_proj": 16,
        "1.self_attn.q_proj": 4,
        "1.mlp.down_proj": 8,
        "1.self_attn.o_proj": 16,
    }
    source = Checkpoint.open(model)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.o_proj.weight"):
        assert torch.equal(written.tensor(name), source.tensor(name))
    assert "skipped as asked" in ctx.texts("info")
    assert distance(logits(ctx.out), logits(model)) < 0.3


def test_matrices_outside_the_decoder_stay_and_are_listed(model: Path, tmp_path: Path) -> None:
    from delivery.checkpoint import CheckpointWriter

    source = Checkpoint.open(model)
    vision = torch.randn(8, 8).to(torch.bfloat16)
    with CheckpointWriter(tmp_path / "vl") as writer:
        writer.copy_files(source)
        for name in source.names():
            writer.add(name, source.tensor(name))
        writer.add("visual.blocks.0.attn.qkv.weight", vision)
        writer.add("model.layers.0.self_attn.q_proj.lora_A.weight", vision)
        writer.finish(source.config)
    ctx = quantize(tmp_path, tmp_path / "vl", scheme="rtn-w4a16", format="compressed-tensors")
    written = Checkpoint.open(ctx.out)
    assert torch.equal(written.tensor("visual.blocks.0.attn.qkv.weight"), vision)
    ignored = written.quantization["ignore"]  # type: ignore[index]
    assert set(ignored) == {"model.layers.0.self_attn.q_proj.lora_A", "lm_head", "re:.*visual.*"}
    assert "2 matrices outside the decoder" in ctx.texts("info")


def test_outliers_need_the_engine_s_own_format(model: Path, calibration: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"scheme": "awq-w4a16", "outliers": 0.002}
    for form in ("awq", "gptq", "compressed-tensors"):
        with pytest.raises(UsageError, match=f"format {form} cannot represent[\\s\\S]*own format"):
            quantize(tmp_path / form, model, calibration, **settings, format=form)
    with pytest.raises(UsageError, match=r"--outliers 0\.002 with --scheme gptq-w4a16"):
        quantize(tmp_path / "g", model, calibration, scheme="gptq-w4a16", outliers=0.002)
    with pytest.raises(UsageError, match=r"--scheme awq-w4a16 --rounding gptq[\s\S]*weight independently"):
        quantize(tmp_path / "h", model, calibration, **settings, rounding="gptq")
    kept = quantize(tmp_path / "kept", model, calibration, **settings, format="deliver")
    weight = Checkpoint.open(kept.out).weight("model.layers.1.mlp.down_proj")
    assert isinstance(weight, QTensor)
    assert weight.outliers is not None
    assert weight.outliers.index.numel() == round(0.002 * 128 * 384)
    assert distance(logits(kept.out), logits(model)) < 0.3


def test_patterns_that_name_nothing_are_mistakes(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pattern '\*\.downproj' matches no linear layer"):
        quantize(tmp_path / "a", model, scheme="rtn-w4a16", skip="*.downproj")
    with pytest.raises(UsageError, match=r"not understood[\s\S]*did you mean 'fp8-dynamic'"):
        quantize(tmp_path / "b", model, scheme="rtn-w4a16", recipe="*.q_proj=fp8-dynamik")
    with pytest.raises(UsageError, match="no linear layer is left to quantise"):
        quantize(tmp_path / "c", model, scheme="rtn-w4a16", skip="*")


def test_biases_survive(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m", bias=True, attention_bias=True, mlp_bias=True)
    calibration = calibrated(model, tmp_path)
    for scheme in ("awq-w4a16", "smoothquant-int8"):
        ctx = quantize(tmp_path / scheme, model, calibration, scheme=scheme, format="auto")
        assert distance(logits(ctx.out), logits(model)) < 0.3


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_cache_scales_are_measured(kv: str, model: Path, calibration: Path, tmp_path: Path) -> None:
    ctx = quantize(tmp_path, model, calibration, scheme="rtn-w4a16", format="compressed-tensors", kv=kv)
    written = Checkpoint.open(ctx.out)
    scales = [float(written.tensor(f"model.layers.{n}.self_attn.{s}_scale")) for n in range(3) for s in "kv"]
    assert len(set(scales)) == 6
    assert all(1e-4 < s < 10 for s in scales)
    assert written.quantization["kv_cache_scheme"]["type"] == ("int" if kv == "int8" else "float")  # type: ignore[index]
    with pytest.raises(UsageError, match=r"cannot store the scales of a KV cache"):
        quantize(tmp_path / "awq", model, calibration, scheme="rtn-w4a16", format="awq", kv=kv)


def test_a_killed_run_goes_on_and_gives_the_same(
    model: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "_SAVE_EVERY_S", 0.0)
    whole = quantize(tmp_path / "whole", model, calibration, scheme="awq-w4a16", clip=True)
    work = Driver.quantize_block
    worked: list[int] = []

    def dying(self: Driver, layer: int) -> Any:
        if layer == 2 and len(worked) == 2:
            raise KeyboardInterrupt
        worked.append(layer)
        return work(self, layer)

    monkeypatch.setattr(Driver, "quantize_block", dying)
    killed = context(tmp_path, "killed", checkpoint=model, calibration=calibration)
    step = Quantize(checkpoint="m", scheme="awq-w4a16", clip=True, group_size="32")
    with pytest.raises(KeyboardInterrupt):
        step.run(killed)
    again = context(tmp_path, "again", checkpoint=model, calibration=calibration)
    again.scratch = killed.scratch
    worked.append(-1)
    step.run(again)
    assert worked == [0, 1, -1, 2]
    for name in ("model.safetensors", "config.json", "layers.json"):
        assert (again.out / name).read_bytes() == (whole.out / name).read_bytes(), name


def test_a_quantised_model_and_a_foreign_calibration_are_refused(
    model: Path, calibration: Path, tmp_path: Path
) -> None:
    done = quantize(tmp_path, model, scheme="rtn-w4a16").out
    with pytest.raises(DataError, match=r"is already quantised[\s\S]*quant_method"):
        quantize(tmp_path / "again", done, scheme="rtn-w4a16")
    small = write_checkpoint(tmp_path / "small", vocab_size=270)
    with pytest.raises(DataError, match="made with another tokenizer"):
        quantize(tmp_path / "foreign", small, calibration, scheme="awq-w4a16")


def test_a_calibration_of_another_checkpoint_is_told(model: Path, calibration: Path, tmp_path: Path) -> None:
    same = context(tmp_path, "same", checkpoint=model, calibration=calibration)
    made_of = {"checkpoint": same.input("checkpoint").digest}
    same.bound["calibration"] = with_inputs(same.input("calibration"), made_of)
    other = context(tmp_path, "other", checkpoint=model)
    other.bound["calibration"] = with_inputs(same.input("calibration"), {"checkpoint": "f" * 64})
    for ctx in (same, other):
        Quantize(scheme="rtn-w4a16", group_size="32").run(ctx)
    assert "another checkpoint" not in same.texts("warning")
    assert "rendered for another checkpoint, ffffffffffff" in other.texts("warning")


def with_inputs(artifact: Artifact, inputs: dict[str, str]) -> Artifact:
    return replace(artifact, manifest=replace(artifact.manifest, inputs=inputs))


def test_a_weight_that_is_not_finite_is_named(model: Path, tmp_path: Path) -> None:
    from delivery.checkpoint import CheckpointWriter

    source = Checkpoint.open(model)
    with CheckpointWriter(tmp_path / "broken") as writer:
        writer.copy_files(source)
        for name in source.names():
            tensor = source.tensor(name)
            if name == "model.layers.1.mlp.up_proj.weight":
                tensor[3, 5] = float("nan")
            writer.add(name, tensor)
        writer.finish(source.config)
    for scheme in ("rtn-w4a16", "fp8-dynamic", "fp8-block", "w8a16"):
        with pytest.raises(DataError, match=r"model\.layers\.1\.mlp\.up_proj"):
            quantize(tmp_path / scheme, tmp_path / "broken", scheme=scheme)


def test_a_limit_on_layer_errors(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"quantised with a relative error of 0\.\d+\n  why:  the limit is 0\.01"
    ):
        quantize(tmp_path, model, scheme="rtn-w4a16", max_layer_error=0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": "7"}, "group size '7' is not understood"),
        ({"alpha": 1.5}, "--alpha is 1.5"),
    ],
)
def test_bad_options(settings: Any, message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(DeliverError, match=message):
        quantize(tmp_path, model, **{"scheme": "rtn-w4a16", **settings})


def test_blocks_that_do_not_divide_leave_a_layer_alone(odd: Path, tmp_path: Path) -> None:
    ctx = quantize(tmp_path, odd, scheme="fp8-block", format="auto")
    note = "down_proj (layers 0 to 2): left in floating point: blocks of 128 do not divide 96 features"
    assert note in ctx.texts("info")
    assert any(n.startswith(note) for n in json.loads((ctx.out / "layers.json").read_text())["notes"])
    assert not isinstance(Checkpoint.open(ctx.out).weight("model.layers.0.mlp.down_proj"), QTensor)
    assert distance(logits(ctx.out), logits(odd)) < 0.3


def test_what_blocks_do_not_divide_can_be_quantised_per_channel(odd: Path, tmp_path: Path) -> None:
    """As the note about such a layer says."""
    plain = quantize(tmp_path / "plain", odd, scheme="fp8-block", format="compressed-tensors")
    (hint,) = re.findall(r"down_proj.*--recipe '(.+)=(.+)'", plain.texts("info"))
    mixed = quantize(
        tmp_path / "mixed", odd, scheme="fp8-block", format="compressed-tensors", recipe="=".join(hint)
    )
    weight = Checkpoint.open(mixed.out).weight("model.layers.0.mlp.down_proj")
    assert isinstance(weight, QTensor)
    assert (weight.qdata.dtype, weight.scale.shape[1]) == (torch.float8_e4m3fn, 1)
    assert "down_proj" not in mixed.texts("info")
    blocks = Checkpoint.open(mixed.out).weight("model.layers.0.mlp.up_proj")
    assert isinstance(blocks, QTensor)
    assert blocks.block_size == 128


def test_ranks_that_cut_a_layer_get_groups_that_fit(odd: Path, tmp_path: Path) -> None:
    ctx = quantize(tmp_path, odd, scheme="rtn-w4a16", format="compressed-tensors", tensor_parallel=8)
    rows = json.loads((ctx.out / "layers.json").read_text())["layers"]
    sizes = {row["canonical"]: row["group_size"] for row in rows}
    assert sizes == {
        "q_proj": 32,
        "k_proj": 32,
        "v_proj": 32,
        "o_proj": 16,
        "gate_proj": 32,
        "up_proj": 32,
    }
    assert "down_proj (layers 0 to 2): left in floating point" in ctx.texts("info")


@pytest.mark.parametrize("loss", ["distill", "next-token"])
def test_the_last_blocks_can_be_tuned(loss: str, model: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "own.jsonl"
    corpus.write_text("\n".join(json.dumps({"text": f"{i * 7}: {WORDS}" * 9}) for i in range(300)))
    ctx = context(tmp_path, "cal", checkpoint=model)
    Calibrate(checkpoint="m", corpus=str(corpus), samples=40, sequence_length=64).run(ctx)
    settings = {"scheme": "rtn-w4a16", "qat": 2, "qat_loss": loss, "qat_steps": 8}
    tuned = quantize(tmp_path / "tuned", model, ctx.out, **settings)
    plain = quantize(tmp_path / "plain", model, ctx.out, scheme="rtn-w4a16")
    assert tuned.metrics["qat_error_after"] < tuned.metrics["qat_error_before"]
    assert "last 2 blocks fine-tuned" in tuned.texts("info")
    weights = [Checkpoint.open(c.out).weight("model.layers.0.mlp.up_proj") for c in (tuned, plain)]
    assert torch.equal(*(w.dequantize() for w in weights))  # type: ignore[union-attr]
    weights = [Checkpoint.open(c.out).weight("model.layers.2.mlp.up_proj") for c in (tuned, plain)]
    assert not torch.equal(*(w.dequantize() for w in weights))  # type: ignore[union-attr]
    if loss == "distill":
        assert distance(logits(tuned.out), logits(model)) < distance(logits(plain.out), logits(model))
    with pytest.raises(UsageError, match="--qat with --no-propagate"):
        quantize(tmp_path / "no", model, ctx.out, **settings, propagate=False)


def test_too_few_samples_to_tune_on_are_told_before_the_first_layer(model: Path, tmp_path: Path) -> None:
    calibrated = context(tmp_path, "cal", checkpoint=model)
    Calibrate(checkpoint="m", corpus="legal", samples=2, sequence_length=64).run(calibrated)
    ctx = context(tmp_path, "tuned", checkpoint=model, calibration=calibrated.out)
    with pytest.raises(DataError, match="fine-tuning has too few samples"):
        Quantize(scheme="rtn-w4a16", group_size="32", qat=1).run(ctx)
    assert not any("layer" in note for note in ctx.notes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group_size": "7"}, "group size '7'"),
        ({"outliers": 0.5}, "--outliers 0.5"),
        ({"qat": 2, "propagate": False}, "--qat with --no-propagate"),
    ],
)
def test_what_cannot_work_is_told_before_anything_runs(change, words):
    with pytest.raises(UsageError, match=words):
        Quantize(checkpoint="x", **change).check()


def ahead(model: Path, **params: Any) -> dict[str, list[Ahead]]:
    return {"checkpoint": [Ahead("convert", params, model)], "calibration": [Ahead("calibrate", CALIBRATED)]}


CALIBRATED = {"samples": 8, "sequence_length": 48}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"skip": "*.down_prj"}, r"pattern '\*\.down_prj' matches no[\s\S]*did you mean '\*\.down_proj'"),
        ({"recipe": "*.layers.7.*=skip"}, r"layers are called like model\.layers\.0\.self_attn\.q_proj"),
        ({"format": "awq", "scheme": "fp8-dynamic"}, "format awq cannot represent"),
        ({"format": "gptq", "kv": "int8"}, "cannot store the scales of a KV cache"),
        ({"skip": "*"}, "no linear layer is left"),
    ],
)
def test_what_cannot_work_is_told_from_config_and_headers(
    settings: dict[str, Any], expected: str, model: Path
) -> None:
    with pytest.raises(UsageError, match=expected):
        Quantize(**settings).preflight(ahead(model))
    Quantize(**settings).preflight({"checkpoint": [Ahead("convert", {})]})  # nothing is known yet


def test_usual_settings_are_checked_without_torch(model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from delivery.steps.quantize import Quantize;"
        "from delivery.steps.step import Ahead;"
        "known = {'checkpoint': [Ahead('convert', {}, Path(sys.argv[1]))], 'calibration': [Ahead('c', {})]};"
        "Quantize(group_size='64').preflight(known);"
        "assert 'torch' not in sys.modules;"
        "Quantize(skip='*.q_proj').preflight(known);"
        "assert 'torch' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code, str(model)], check=False).returncode == 0


def test_calibration_that_will_be_needed_is_missed_at_once(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="scheme 'awq-w4a16' needs calibration data"):
        Quantize().preflight({"checkpoint": ahead(model)["checkpoint"]})
    Quantize(scheme="rtn-w4a16").preflight({"checkpoint": ahead(model)["checkpoint"]})
    done = quantize(tmp_path, model, scheme="rtn-w4a16").out
    with pytest.raises(DataError, match="already quantised"):
        Quantize().preflight(ahead(done))


def test_size_and_peak_are_predicted_before_anything_is_made(model: Path, tmp_path: Path) -> None:
    known = {**ahead(model), "checkpoint": [Ahead("convert", {}, predict=lambda: Checkpoint.open(model))]}
    step = Quantize(scheme="rtn-w4a16", group_size="32")
    few, many = (
        step.predict_peak({**known, "calibration": [Ahead("calibrate", {**CALIBRATED, "samples": n})]})
        for n in (8, 8000)
    )
    assert few is not None
    assert many is not None
    assert many.host_bytes > few.host_bytes + 7000 * 48 * 128 * 4
    outline = step.outline(known)
    assert outline is not None
    written = Checkpoint.open(quantize(tmp_path, model, scheme="rtn-w4a16").out)
    assert abs(outline.size_bytes() / written.size_bytes() - 1) < 0.1
    assert outline.quantization is not None
