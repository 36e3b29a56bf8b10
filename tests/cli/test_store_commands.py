from __future__ import annotations

import json
import shutil

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from delivery.artifact import Kind, Manifest, hash_tree, read_artifact, write_manifest


@pytest.fixture
def ran(deliver):
    """Stage → digest of one run."""
    return {s["name"]: s["artifact"] for s in json.loads(deliver("run", "p.yaml", "--json")[1])["steps"]}


def test_ls(deliver, ran):
    deliver("tag", "good", ran["assemble"])
    rows = json.loads(deliver("ls", "--json")[1])["artifacts"]
    assert {r["artifact"] for r in rows} >= set(ran.values())
    engine = next(r for r in rows if r["artifact"] == ran["assemble"])
    assert (engine["kind"], engine["step"], engine["tags"]) == ("engine", "assemble", ["good"])
    out = deliver("ls", "--kind", "engine")[1].splitlines()
    assert len(out) == 2
    assert out[1].startswith(ran["assemble"][:12])
    assert out[1].endswith("good")
    assert deliver("ls", "--workdir", "empty") == (0, "artifact  kind  step  size  made  tags\n", "")


def test_inspect_an_artifact_and_its_report(deliver, ran):
    out = deliver("inspect", ran["shrink"][:8])[1]
    assert "made by: shrink (version 1)" in out
    assert "group_size: 64" in out
    assert f"checkpoint: {ran['make'][:12]}" in out
    shown = json.loads(deliver("inspect", ran["assemble"], "--json")[1])
    assert shown["kind"] == "engine"
    assert [(r["check"], r["verdict"]) for r in shown["reports"]] == [("probe", "pass")]
    out = deliver("inspect", ran["assemble"], "--report", "probe")[1]
    assert "verdict: pass" in out
    assert "ttft_p95_ms 10 ms, limit 20 ms  [pass]" in out
    code, _, err = deliver("inspect", ran["assemble"], "--report", "prob")
    assert (code, "did you mean 'probe'" in err) == (2, True)


def test_the_newest_report_is_shown(deliver, ran):
    deliver("run", "p.yaml", "--set", "gate.limits.ttft_p95_ms=5")
    out = deliver("inspect", ran["assemble"], "--report", "probe")[1]
    assert "verdict: fail" in out


def test_verify_names_the_damaged_file(deliver, ran, tmp_path):
    assert deliver("verify")[0] == 0
    deliver("shrink", "--checkpoint", ran["make"], "--out", "o")
    assert "every file matches" in deliver("verify", "o")[1]
    weights = tmp_path / "o/weights.bin"
    weights.chmod(0o644)
    content = bytearray(weights.read_bytes())
    content[1000:2024] = bytes(1024)
    before = weights.stat()
    weights.write_bytes(content)
    import os

    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # even if no time tells
    code, out, err = deliver("verify", "o")
    assert (code, out) == (1, "")
    assert err.startswith("error[artifact-damaged]: o is damaged\n  why:  weights.bin has SHA-256 ")


def test_verify_of_nothing_says_so(deliver):
    assert deliver("verify") == (0, "there are no artifacts in .deliver\n", "")


def test_verify_goes_on_after_the_first_damaged_artifact(deliver, ran, tmp_path):
    for name in ("make", "assemble"):
        file = next(
            p
            for p in (tmp_path / ".deliver/artifacts" / ran[name]).glob("*")
            if p.suffix != ".json" or p.name == "engine.json"
        )
        file.chmod(0o644)
        file.write_bytes(b"other")
    (tmp_path / ".deliver/artifacts" / ran["pack"] / "manifest.json").write_text("{")
    code, out, err = deliver("verify")
    assert code == 1
    damaged = [line for line in out.splitlines() if ": damaged: " in line]
    assert len(damaged) == 3
    assert sum("every file matches" in line for line in out.splitlines()) == len(out.splitlines()) - 3
    assert err.startswith("error[artifact-damaged]: 3 of ")
    assert all(ran[name] in err for name in ("make", "assemble", "pack"))
    code, out, _ = deliver("verify", "--json")
    answer = json.loads(out)
    assert (code, answer["passed"], answer["error"]["code"]) == (1, False, "artifact-damaged")
    assert sum(not row["passed"] for row in answer["artifacts"]) == 3


def test_verify_a_plain_directory_of_a_broken_model(deliver, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "model.safetensors").write_bytes(b"\x00" * 4)
    code, _, err = deliver("verify", "hf")
    assert code == 1
    assert "model.safetensors" in err


def test_tag(deliver, ran):
    assert deliver("tag", "v1", ran["pack"][:8]) == (0, f"v1  {ran['pack'][:12]}\n", "")
    assert deliver("tag")[1] == f"v1  {ran['pack'][:12]}\n"
    assert deliver("inspect", "v1")[0] == 0
    assert deliver("tag", "--delete", "v1")[0] == 0
    assert deliver("tag")[1] == ""
    assert deliver("tag", "x")[0] == 2


def test_gc(deliver, ran):
    deliver("run", "p.yaml", "--set", "shrink.group_size=32")
    predicted = json.loads(deliver("gc", "--dry-run", "--json")[1])
    assert ran["shrink"] in predicted["removed"]
    assert ran["make"] not in predicted["removed"]
    assert deliver("inspect", ran["shrink"])[0] == 0
    assert f"{ran['shrink'][:12]}  checkpoint  shrink" in deliver("gc")[1]
    assert deliver("inspect", ran["shrink"])[0] == 2
    assert json.loads(deliver("gc", "--json")[1])["removed"] == []


def test_diff(deliver, ran):
    deliver("run", "p.yaml", "--set", "shrink.group_size=32", "--until", "shrink")
    small = next(
        r["artifact"]
        for r in json.loads(deliver("ls", "--json")[1])["artifacts"]
        if r["step"] == "shrink" and r["artifact"] != ran["shrink"]
    )
    out = deliver("diff", ran["shrink"], small)[1]
    assert "params.group_size: 64 → 32\n" in out
    assert "files.config.json: " in out
    assert "weights.bin" not in out
    assert deliver("diff", small, small)[1] == "the same\n"
    assert json.loads(deliver("diff", small, small, "--json")[1]) == {"same": True, "changes": {}}


def test_metrics_are_compared(deliver, ran):
    deliver("run", "p.yaml", "--set", "probe.value=12")
    reports = [
        r["artifact"]
        for r in json.loads(deliver("ls", "--kind", "report", "--json")[1])["artifacts"]
        if r["verdict"]
    ]
    assert len(reports) == 2
    assert "metrics.ttft_p95_ms: " in deliver("diff", *reports)[1]


def test_an_exported_artifact_knows_its_twin(deliver, ran, tmp_path):
    deliver("assemble", "--checkpoint", ran["shrink"], "--out", "e")
    assert read_artifact(tmp_path / "e").digest == ran["assemble"]
    assert deliver("tag", "t", "e")[0] == 0


def test_inspect_describes_a_checkpoint_of_any_origin(deliver, tiny_checkpoint, tmp_path):
    shown = json.loads(deliver("inspect", str(tiny_checkpoint), "--json")[1])
    assert (shown["family"], shown["format"]) == ("llama", "safetensors")
    assert shown["engines"]["deliver"]["loads"] is True
    out = deliver("inspect", str(tiny_checkpoint))[1]
    assert "LlamaForCausalLM (llama)" in out
    assert "loads in:" in out
    code, _, err = deliver("inspect", str(tmp_path / "nowhere"))
    assert (code, "nowhere" in err) == (2, True)


def test_inspect_describes_a_checkpoint_that_deliver_made(deliver, tiny_checkpoint, tmp_path):
    made = shutil.copytree(tiny_checkpoint, tmp_path / "made")
    write_manifest(made, Manifest(Kind.CHECKPOINT, "convert", 1, files=hash_tree(made)))
    out = deliver("inspect", "made")[1]
    assert "made by: convert (version 1)" in out
    assert "LlamaForCausalLM (llama)" in out


def test_a_key_for_what_is_no_release(deliver, ran, tmp_path):
    code, _, err = deliver("verify", ran["make"], "--key", "p.yaml")
    assert (code, "error[signing-key-unreadable]: p.yaml is not a public key" in err) == (2, True)
    public = Ed25519PrivateKey.generate().public_key()
    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "key.pem").write_bytes(public.public_bytes(*form))
    code, _, err = deliver("verify", ran["make"], "--key", "key.pem")
    assert (code, "error[not-a-release]" in err) == (1, True)


def test_a_release_that_lost_its_index_is_none_whatever_its_manifest_says(deliver, tmp_path):
    """A manifest is signed by nobody: whoever changes a release can write another one beside it."""
    folder = tmp_path / "release"
    folder.mkdir()
    (folder / "RUNBOOK.md").write_text("changed")
    write_manifest(folder, Manifest(Kind.RELEASE, "package", 2, {}, {}, hash_tree(folder)))
    code, _, err = deliver("verify", "release")
    assert (code, "error[not-a-release]" in err) == (1, True)
