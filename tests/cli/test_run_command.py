from __future__ import annotations

import json

import fake_steps

from delivery.artifact import read_artifact


def test_a_run_ends_with_where_things_are(deliver, tmp_path):
    code, out, err = deliver("run", "p.yaml")
    assert code == 0, err
    lines = out.strip().splitlines()
    assert lines[-1] == "passed"
    release = next(line for line in lines if line.startswith("release: ")).split()[1]
    report = next(line for line in lines if line.startswith("report:  ")).split()[1]
    assert read_artifact(tmp_path / release).kind == "release"
    assert (tmp_path / report).name == "report.html"
    assert (tmp_path / report).is_file()
    assert "ttft_p95_ms 10 ms" in out
    assert "words: 3/3" in err


def test_json(deliver, tmp_path):
    code, out, _ = deliver("run", "p.yaml", "--json", "--model", "other")
    shown = json.loads(out)
    assert (code, shown["passed"]) == (0, True)
    assert [s["name"] for s in shown["steps"]] == list(fake_steps.STEPS)
    assert (tmp_path / shown["release"] / "release.json").is_file()
    assert all((tmp_path / s["path"]).is_dir() for s in shown["steps"])
    again = json.loads(deliver("run", "p.yaml", "--json", "--model", "other")[1])
    assert [s["cached"] for s in again["steps"]] == [True] * 5


def test_a_failed_gate_exits_3_and_still_prints_the_object(deliver):
    code, out, err = deliver("run", "p.yaml", "--json", "--set", "gate.limits.ttft_p95_ms=5")
    shown = json.loads(out)
    assert (code, shown["passed"], shown["release"]) == (3, False, None)
    assert [s["passed"] for s in shown["steps"]] == [True, True, True, False]
    assert err.splitlines()[-3].startswith("error[gate-failed]: probe rejected")


def test_a_part_of_a_pipeline(deliver):
    names = [
        s["name"] for s in json.loads(deliver("run", "p.yaml", "--json", "--stage", "shrink")[1])["steps"]
    ]
    assert names == ["make", "shrink"]
    names = [
        s["name"] for s in json.loads(deliver("run", "p.yaml", "--json", "--until", "assemble")[1])["steps"]
    ]
    assert names == ["make", "shrink", "assemble"]
    code, _, err = deliver("run", "p.yaml", "--stage", "shrnk")
    assert (code, "did you mean 'shrink'" in err) == (2, True)


def test_force_with_and_without_a_name(deliver, tmp_path):
    deliver("run", "p.yaml")

    def done(*args):
        return [not s["cached"] for s in json.loads(deliver("run", *args, "--json")[1])["steps"]]

    assert done("p.yaml", "--force", "shrink") == [False, True, False, False, False]
    assert done("p.yaml", "--force") == [True] * 5
    assert done("--force", "p.yaml") == [True] * 5


def test_plan_touches_nothing(deliver, tmp_path):
    code, out, _ = deliver("run", "p.yaml", "--plan")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(fake_steps.STEPS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.yaml"]
    deliver("run", "p.yaml")
    shown = json.loads(deliver("run", "p.yaml", "--plan", "--json", "--set", "shrink.mode=slow")[1])
    assert [s["status"] for s in shown["steps"]] == ["cached", "run", "run", "run", "run"]
    assert shown["steps"][1]["why"] == "mode fast → slow"


def test_errors_of_the_file_are_usage_errors(deliver, tmp_path):
    (tmp_path / "p.yaml").write_text(fake_steps.PIPELINE.replace("group_size", "grup_size"))
    code, out, err = deliver("run", "p.yaml")
    assert (code, out) == (2, "")
    assert err == (
        "error[unknown-key]: p.yaml:6: step 'shrink' has no parameter 'grup_size'\n"
        "  hint: did you mean 'group_size'?\n"
    )
    code, _, err = deliver("run", "no.yaml")
    assert (code, "error[pipeline-not-found]" in err) == (2, True)
    assert not (tmp_path / ".deliver").exists()


def test_workdir_from_the_environment(deliver, tmp_path, monkeypatch):
    monkeypatch.setenv("DELIVER_WORKDIR", str(tmp_path / "w"))
    deliver("run", "p.yaml", "--until", "make")
    assert (tmp_path / "w/latest/make/config.json").is_file()
