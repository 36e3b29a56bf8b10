"""Engine directories: the same results as the checkpoint, the settings that were built in, clear refusals."""

from __future__ import annotations

import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import tiny_families
import torch

from delivery.artifact import hash_tree
from delivery.engine import LLM, SamplingParams, build
from delivery.engine.directory import is_engine
from delivery.engine.packed_files import Packer, unpack
from delivery.errors import DataError, EnvironmentLacking, UsageError

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engine")
    build(tiny_checkpoint, out, device="cpu", max_model_len=128, max_num_seqs=4, block_size=16)
    return out


def test_engine_computes_what_the_checkpoint_does(engine: Path, tiny_checkpoint: Path) -> None:
    assert is_engine(engine)
    assert not is_engine(tiny_checkpoint)
    with LLM(engine) as packed, LLM(tiny_checkpoint) as plain:
        ids = plain.encode("the same text for both")
        for ours, theirs in zip(packed.logits(ids), plain.logits(ids), strict=True):
            torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
        prompts = ["hello", "x"]
        assert [o.text for o in packed.generate(prompts, GREEDY)] == [
            o.text for o in plain.generate(prompts, GREEDY)
        ]


@pytest.mark.parametrize("name", ["gemma3", "glm", "qwen2-moe", "qwen3.5"])
def test_other_families_are_kept_whole(name: str, tmp_path: Path) -> None:
    tiny_families.build(name).save_pretrained(tmp_path / "checkpoint")
    build(tmp_path / "checkpoint", tmp_path / "engine", device="cpu", block_size=16, max_num_seqs=2)
    ids = [5, 9, 40, 41, 7, 3] * 6
    with LLM(tmp_path / "engine") as packed, LLM(tmp_path / "checkpoint", block_size=16) as plain:
        assert torch.equal(torch.cat(list(packed.logits(ids))), torch.cat(list(plain.logits(ids))))
        made = packed.generate([ids], GREEDY)[0]
        assert made.token_ids == plain.generate([ids], GREEDY)[0].token_ids


def test_settings_are_built_in_and_can_be_overridden(engine: Path) -> None:
    with LLM(engine) as llm:
        assert (llm.stats().max_model_len, llm.stats().block_size) == (128, 16)
        assert llm.core.scheduler.config.max_num_seqs == 4
    with LLM(engine, max_model_len=64) as llm:
        assert llm.stats().max_model_len == 64
    with pytest.raises(UsageError, match="was built for float32"):
        LLM(engine, dtype="bfloat16")


def test_fewer_blocks_than_a_session_shorten_sessions(engine: Path) -> None:
    with LLM(engine, cache_max_entry_count=3) as llm:
        assert llm.stats().max_model_len == 48
    with pytest.raises(EnvironmentLacking, match="does not fit"):
        LLM(engine, cache_max_entry_count=3, max_model_len=128)


def test_equal_builds_are_equal_whatever_memory_is_free(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for free in (8 << 30, 9 << 30):
        monkeypatch.setattr("delivery.engine.assemble.free_memory", lambda device, free=free: free)
        out = tmp_path / str(free)
        build(tiny_checkpoint, out, device="cpu", block_size=16, max_num_seqs=4)
        made.append({ref.path: ref.sha256 for ref in hash_tree(out)})
    assert made[0] == made[1]


def test_engine_json_says_what_it_is(engine: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    about = json.loads((engine / "engine.json").read_text())
    assert about["device"]["kind"] == "cpu"
    assert about["build"]["torch"] == version("torch")
    plan = about["plan"]
    assert plan["kv_tokens"] == plan["num_blocks"] * 16
    parts = ("weights", "peak", "overhead", "state", "kv")
    assert plan["total_bytes"] == sum(plan[f"{part}_bytes"] for part in parts)
    for fusion in about["fusion"]:
        assert len(fusion["kernels"]) <= len(fusion["operators"])
        assert fusion["passes_after"] <= fusion["passes_before"]
    assert (engine / "tokenizer.json").read_bytes() == (tiny_checkpoint / "tokenizer.json").read_bytes()
    build(tiny_checkpoint, tmp_path / "again", device="cpu", max_model_len=128, max_num_seqs=4, block_size=16)
    for name in ("layout.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (engine / name).read_bytes()


def rewrite(engine: Path, copy: Path, name: str, change: Any) -> Path:
    copy.mkdir()
    for file in engine.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    text = json.loads((copy / name).read_text())
    change(text)
    (copy / name).write_text(json.dumps(text))
    return copy


def test_stale_choices_are_made_anew_or_refused(
    engine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stale = rewrite(engine, tmp_path / "e", "engine.json", lambda a: a["build"].update(torch="2.0.0"))
    with caplog.at_level(logging.WARNING), LLM(stale):
        assert f"torch 2.0.0 → {version('torch')}" in caplog.text
    with pytest.raises(EnvironmentLacking, match="not built for this machine") as caught:
        LLM(stale, mismatch="refuse")
    assert "torch 2.0.0" in caught.value.why


def test_another_device_or_layout_is_refused(engine: Path, tmp_path: Path) -> None:
    other = rewrite(engine, tmp_path / "a", "engine.json", lambda a: a["build"]["device"].update(kind="cuda"))
    with pytest.raises(EnvironmentLacking, match="it was built for cuda, this is cpu"):
        LLM(other)
    old = rewrite(engine, tmp_path / "b", "engine.json", lambda a: a["build"].update(layout=0))
    with pytest.raises(EnvironmentLacking, match="packed in layout 0"):
        LLM(old)
    future = rewrite(engine, tmp_path / "c", "engine.json", lambda a: a.update(format_version=9))
    with pytest.raises(DataError, match="another version"):
        LLM(future)


def test_damage_is_named(engine: Path, tmp_path: Path) -> None:
    unsigned = rewrite(engine, tmp_path / "b", "engine.json", lambda a: a.pop("form_sha256"))
    broken = rewrite(unsigned, tmp_path / "a", "layout.json", lambda a: a.pop("head"))
    with pytest.raises(DataError, match=r"layout\.json cannot be read"):
        LLM(broken)
    foreign = rewrite(
        unsigned, tmp_path / "c", "layout.json", lambda a: a["head"].update({"class": "os:system"})
    )
    with pytest.raises(DataError, match="is not a class of this package"):
        LLM(foreign)


def smaller_shape(layout: dict[str, Any]) -> None:
    _, product = layout["blocks"][0]["fields"]["products"]["map"][0]
    product["fields"]["run"]["fields"]["packed"]["fields"]["shape"]["tuple"][0] = 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("layout.json", smaller_shape),
        (
            "layout.json",
            lambda a: a["blocks"]["tuple"].pop() if "tuple" in a["blocks"] else a["blocks"].pop(),
        ),
        ("config.json", lambda a: a.update(num_attention_heads=2, head_dim=32)),
    ],
)
def test_sizes_that_were_changed_are_refused(engine: Path, tmp_path: Path, name: str, change: Any) -> None:
    """A kernel that believes a wrong size reads memory that is not its own."""
    changed = rewrite(engine, tmp_path / "a", name, change)
    with pytest.raises(DataError, match="are not those that were built") as caught:
        LLM(changed)
    assert caught.value.code == "engine-damaged"


@pytest.mark.parametrize("change", [{"build": None}, {"build": {"device": "cpu"}}, {"options": [1]}])
def test_an_engine_json_of_the_wrong_kind_is_named(engine: Path, tmp_path: Path, change: Any) -> None:
    changed = rewrite(engine, tmp_path / "a", "engine.json", lambda a: a.update(change))
    with pytest.raises(DataError, match=r"engine\.json cannot be read"):
        LLM(changed)


def test_packed_values_come_back() -> None:
    tensors: dict[str, torch.Tensor] = {}
    shared = torch.arange(6.0)
    value = {("q", "k"): (1, None, 2.5, "x", torch.int8, shared), "again": shared}
    described = json.loads(json.dumps(Packer(tensors.__setitem__).pack(value, "at")))
    back = unpack(described, tensors.__getitem__)
    assert len(tensors) == 1
    assert back["q", "k"][:5] == (1, None, 2.5, "x", torch.int8)
    assert back["again"] is back["q", "k"][5]
    with pytest.raises(TypeError, match="a set cannot be stored"):
        Packer(tensors.__setitem__).pack({1}, "x")
