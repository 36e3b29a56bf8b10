"""A broken model is stopped, with a report that says what was seen, and is never packaged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from demo_run import Ran, run_demo
from safetensors.torch import load_file, save_file

from delivery.gate.report import Report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SWAPPED = (10, 20)


@pytest.fixture
def broken(source: Path, tmp_path: Path) -> Path:
    """A copy of the source to break; the weights are a link until somebody writes them anew."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            os.link(file, folder / file.name)
        elif file.name not in ("manifest.json", "run.json"):
            shutil.copy(file, folder / file.name)
    return folder


def edit(path: Path, **values: object) -> None:
    config = json.loads(path.read_text("utf-8"))
    assert set(values) <= set(config)
    path.write_text(json.dumps({**config, **values}), "utf-8")


def stopped(ran: Ran, workdir: Path) -> Report:
    """The report of the check that ended the run; nothing was packaged."""
    assert ran.code == 3, ran.err
    assert ran.shown["release"] is None
    assert "package" not in ran.names
    last = ran.shown["steps"][-1]
    assert not last["passed"]
    folder = Path(last["path"])
    assert (folder / "report.html").is_file()
    assert folder.is_relative_to(workdir)
    return Report.read(folder)


def seen(report: Report) -> str:
    return "\n".join(f.text for f in report.findings)


def failed(report: Report) -> set[str]:
    return {m.name for m in report.metrics if m.status == "fail"}


def test_a_wrong_rope_theta(broken, tmp_path):
    edit(broken / "config.json", rope_theta=10000.0)
    report = stopped(run_demo(tmp_path / "work", "--model", str(broken)), tmp_path)
    assert report.check in ("smoke", "evaluate")
    assert failed(report) & {"smoke_failed_prompts", "smoke_looping_outputs"}, failed(report)
    assert "expected" in seen(report) or "repeats itself" in seen(report)


def test_swapped_layers(broken, tmp_path):
    weights = broken / "model.safetensors"
    tensors = load_file(weights)
    one, other = (f"model.layers.{n}." for n in SWAPPED)

    def moved(name: str) -> str:
        if name.startswith(one):
            return other + name.removeprefix(one)
        return one + name.removeprefix(other) if name.startswith(other) else name

    weights.unlink()
    save_file({moved(name): tensor for name, tensor in tensors.items()}, weights)
    report = stopped(run_demo(tmp_path / "work", "--model", str(broken)), tmp_path)
    assert report.check in ("smoke", "evaluate")
    assert "smoke_perplexity" in failed(report)


def test_a_template_that_never_ends_the_turn(broken, tmp_path):
    config = json.loads((broken / "tokenizer_config.json").read_text("utf-8"))
    template = config["chat_template"]
    assert "<|im_end|>" in template
    edit(broken / "tokenizer_config.json", chat_template=template.replace("<|im_end|>", ""))
    report = stopped(run_demo(tmp_path / "work", "--model", str(broken)), tmp_path)
    assert report.check == "smoke"
    assert "smoke_open_turns" in failed(report)
    assert "no token that ends generation" in seen(report)


def test_a_truncated_shard(broken, tmp_path):
    weights = broken / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content[: len(content) // 2])
    ran = run_demo(tmp_path / "work", "--model", str(broken))
    assert ran.code == 1
    assert "model.safetensors" in ran.err
    assert "Traceback" not in ran.err
    assert not list((tmp_path / "work" / "artifacts").glob("*"))
