from __future__ import annotations

import json

import fake_steps
import pytest

from delivery.artifact import read_artifact


@pytest.fixture
def plain(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["A"]}')
    return folder


def test_a_step_alone_with_out(deliver, plain, tmp_path):
    options = ["--group-size", "32", "--skip", "a", "--skip", "b", "--strict", "--out", "o"]
    code, out, err = deliver("shrink", "--checkpoint", "hf", *options)
    assert code == 0, err
    made = read_artifact(tmp_path / "o")
    assert made.manifest.params == {
        "group_size": 32,
        "mode": "fast",
        "scale": 1.0,
        "skip": ["a", "b"],
        "strict": True,
        "limit": None,
        "seed": 0,
    }
    assert "checkpoint: o\n" in out
    assert made.digest[:12] in out


def test_json_is_exactly_one_object_on_stdout(deliver, plain):
    code, out, err = deliver("shrink", "--checkpoint", "hf", "--json", "--out", "o")
    assert code == 0
    shown = json.loads(out)
    assert set(shown) == {"name", "artifact", "path", "cached", "seconds", "passed", "metrics"}
    assert (shown["name"], shown["path"], shown["cached"]) == ("shrink", "o", False)
    assert "shrink" in err
    assert json.loads(deliver("shrink", "--checkpoint", "hf", "--json")[1])["cached"] is True
    assert json.loads(deliver("shrink", "--checkpoint", "hf", "--json", "--force")[1])["cached"] is False


def test_options_that_all_steps_share(deliver, plain):
    assert deliver("shrink", "--checkpoint", "hf", "--seed", "3", "--workdir", "w")[0] == 0
    params = json.loads(deliver("ls", "--workdir", "w", "--json")[1])["artifacts"]
    assert len(params) == 1
    code, _, err = deliver("assemble", "--checkpoint", "hf", "--device", "gpu")
    assert (code, "unknown-device" in err) == (2, True)
    out = deliver("shrink", "--help")[1]
    for words in ("Make a checkpoint smaller.", "More words about it.", "--group-size N", "--mode fast|slow"):
        assert words in out
    assert "[default: 64]" in out
    assert "--strict / --no-strict" in out


def test_a_check_alone_is_judged_by_a_pipelines_gate(deliver, plain, tmp_path):
    deliver("assemble", "--checkpoint", "hf", "--out", "e")
    (tmp_path / "strict.yaml").write_text(fake_steps.PIPELINE.replace("ttft_p95_ms: 20", "ttft_p95_ms: 5"))
    assert deliver("probe", "--engine", "e", "--pipeline", "p.yaml", "--out", "r")[0] == 0
    code, out, err = deliver("probe", "--engine", "e", "--pipeline", "strict.yaml", "--out", "r")
    assert code == 3
    assert "error[gate-failed]: probe rejected" in err
    assert "ttft_p95_ms 10 ms, limit 5 ms [fail]" in out
    assert json.loads((tmp_path / "r/report.json").read_text())["verdict"] == "fail"
    assert deliver("pack", "--engine", "e", "--report", "r", "--out", "rel")[0] == 0
    digest = read_artifact(tmp_path / "r").digest
    assert json.loads((tmp_path / "rel/release.json").read_text())["reports"] == [digest]


def test_a_wrong_kind_is_refused(deliver, plain):
    code, _, err = deliver("probe", "--engine", "hf", "--pipeline", "p.yaml")
    assert code == 2
    assert "error[wrong-kind]: hf is not an engine" in err


def test_an_unreadable_input_is_refused(deliver, tmp_path):
    code, _, err = deliver("shrink", "--checkpoint", "nowhere")
    assert (code, "error[unknown-ref]" in err) == (2, True)
    (tmp_path / "empty").mkdir()
    code, _, err = deliver("shrink", "--checkpoint", "empty")
    assert (code, "error[not-an-artifact]" in err) == (1, True)
