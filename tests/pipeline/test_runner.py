from __future__ import annotations

import io
import json
import os
from datetime import date

import fake_steps
import pytest

import delivery.artifact
from delivery.artifact import read_artifact
from delivery.errors import DataError, EnvironmentLacking, UsageError
from delivery.gate.report import Report
from delivery.pipeline.planner import plan
from delivery.pipeline.progress import Lines
from delivery.pipeline.result import table
from delivery.pipeline.runner import EVERYTHING, model_name
from delivery.pipeline.single import run_step
from delivery.pipeline.spec import load_pipeline

ALL = ["make", "shrink", "assemble", "probe", "judge", "pack"]


def names(result):
    return {s.name: s.cached for s in result.steps}


def test_a_second_run_only_judges(go, trace):
    first = go()
    assert trace() == ALL
    second = go()
    assert trace() == ["judge"]
    assert names(second) == dict.fromkeys(names(first), True)
    assert [s.artifact for s in first.steps] == [s.artifact for s in second.steps]
    assert second.error is None
    assert second.complete


def test_a_parameter_re_runs_its_step_and_what_follows(go, trace):
    go()
    trace()
    go("shrink.group_size=32")
    assert trace() == ["shrink", "assemble", "probe", "judge", "pack"]
    go()
    assert trace() == ["judge"]


def test_a_missing_outside_file_is_told_before_anything_runs(go, trace, store):
    text = fake_steps.PIPELINE.replace(
        "- uses: make", "- uses: make\n  - {uses: make, id: more, with: {model: no.txt}}"
    )
    with pytest.raises(DataError, match="there is no source no"):
        go(text=text)
    assert trace() == []
    assert not store.workdir.exists()


def test_a_device_that_is_not_there_is_told_before_anything_runs(go, trace, store, monkeypatch):
    monkeypatch.setattr("delivery.device.gpu_count", lambda: 0)
    with pytest.raises(EnvironmentLacking, match="no NVIDIA GPU"):
        go("defaults.device=cuda")
    assert trace() == []
    assert not store.workdir.exists()


def test_equal_output_stops_the_re_running(go, trace):
    go()
    trace()
    go("make.words=3", "shrink.threads=4")
    assert trace() == ["judge"]
    go(force=["shrink"])
    assert trace() == ["shrink", "judge"]  # the same bytes came out


def test_force_everything(go, trace):
    go()
    trace()
    go(force=[EVERYTHING])
    assert trace() == ALL
    with pytest.raises(UsageError, match="has no stage 'shrnk'"):
        go(force=["shrnk"])


def test_stage_runs_what_it_needs_and_until_stops_there(go, trace):
    result = go(stages=["assemble"])
    assert trace() == ["make", "shrink", "assemble"]
    assert not result.complete
    go(until="shrink")
    assert trace() == []
    go(stages=["probe"])
    assert trace() == ["probe", "judge"]


def test_a_changed_source_re_runs(go, trace, tmp_path):
    source = tmp_path / "source.txt"
    source.write_text("one")
    go(model=str(source))
    trace()
    go(model=str(source))
    assert trace() == ["judge"]
    source.write_text("two")
    go(model=str(source))
    assert trace() == ALL


def test_a_large_source_is_not_read_again(go, tmp_path, monkeypatch):
    source = tmp_path / "source.txt"
    source.write_text("one")
    os.utime(source, (1e9, 1e9))
    go(model=str(source))
    read = []
    monkeypatch.setattr(delivery.artifact, "read_hash", lambda path: read.append(path) or 1 / 0)
    go(model=str(source))
    assert read == []


def test_a_number_that_is_none_becomes_a_finding(go, monkeypatch):
    monkeypatch.setattr(
        fake_steps.Assemble, "run", lambda self, ctx: ctx.metric("m", float("nan"), "x", "lower")
    )
    step = go(until="assemble").steps[-1]
    assert step.metrics() == {}
    assert step.record["findings"] == [{"severity": "error", "text": "m is nan"}]


def test_a_failed_gate_keeps_its_report_and_stops(go, store, trace):
    go()
    trace()
    result = go("gate.limits.ttft_p95_ms=5")
    assert trace() == ["judge"]  # not measured again
    assert result.error.exit_code == 3
    subject = result.steps[2].artifact.digest[:12]
    assert result.error.render() == (
        f"error[gate-failed]: probe rejected {subject}\n"
        "  why:  ttft_p95_ms is 10 ms (limit 5)\n"
        f"  hint: deliver inspect {subject} --report probe"
    )
    assert [s.name for s in result.steps] == ["make", "shrink", "assemble", "probe"]
    report = Report.read(result.steps[-1].artifact.path)
    assert report.verdict == "fail"
    assert report.subject == result.steps[2].artifact.digest
    assert result.steps[-1].artifact.file("report.html").read_text() == "<p>fail"
    assert result.steps[-1].artifact.file("measured.json").is_file()
    assert (store.workdir / "reports/probe/report.html").read_text() == "<p>fail"
    assert not (store.workdir / "latest/pack").exists()  # an old release is not this run's
    assert result.release is None
    assert go().error is None
    assert (store.workdir / "latest/pack/release.json").is_file()


def test_a_judging_parameter_judges_again(go, trace):
    go("probe.value=30", "probe.tolerance=2")
    trace()
    assert go("probe.value=30").error.exit_code == 3
    assert trace() == ["judge"]


def test_an_invalid_measurement_is_no_pass_and_is_made_again(go, trace, store, pipeline_file):
    result = go("probe.value=-1")
    assert result.error.exit_code == 4
    assert result.error.code == "measurement-invalid"
    assert "probe cannot judge" in result.error.render()
    assert trace()[-2:] == ["probe", "judge"]
    rows = plan(load_pipeline(pipeline_file, ["probe.value=-1"], steps=fake_steps.STEPS), store)
    assert next((r.id, r.why) for r in rows if r.status == "run") == (
        "probe",
        "the stored measurement is inconclusive",
    )
    said = io.StringIO()
    go("probe.value=-1", said=said)
    assert trace() == ["judge", "probe", "judge"]
    assert "measuring again" in said.getvalue()


def test_the_hint_of_a_failed_gate_finds_the_report_of_a_stage_with_another_name(go):
    text = fake_steps.PIPELINE.replace("- uses: probe", "- {id: speed, uses: probe}")
    assert text != fake_steps.PIPELINE
    result = go("gate.limits.ttft_p95_ms=5", text=text)
    assert result.error.what.startswith("speed rejected")
    assert result.error.hint.endswith("--report probe")


WAIVED = fake_steps.PIPELINE.replace(
    "limits: {ttft_p95_ms: 20}",
    "limits: {ttft_p95_ms: 5}\n"
    "  waivers:\n    - {metric: ttft_p95_ms, owner: ann, reason: known, expires: 2030-01-31}",
)


def test_a_waiver_lets_a_failed_metric_pass_until_its_day(go):
    result = go(text=WAIVED, today=date(2030, 1, 31))
    assert result.error is None
    assert result.last_line() == "passed, but ttft_p95_ms is waived"
    assert result.release is not None
    report = result.steps[3].report
    assert report.verdict == "waived"
    assert any("ann" in f.text and "known" in f.text for f in report.findings)
    late = go(text=WAIVED, today=date(2030, 2, 1))
    assert late.error.exit_code == 3
    assert "waiver expired" in late.error.why


def test_the_json_object(go):
    shown = go().to_json()
    assert set(shown) == {"passed", "steps", "release"}
    assert shown["passed"] is True
    assert shown["release"].endswith(shown["steps"][-1]["artifact"])
    assert set(shown["steps"][0]) == {"name", "artifact", "path", "cached", "seconds", "passed", "metrics"}
    assert shown["steps"][0]["metrics"] == {"words": 3}
    assert shown["steps"][3]["metrics"] == {"ttft_p95_ms": 10.0}
    failed = go("gate.limits.ttft_p95_ms=5").to_json()
    assert (failed["passed"], failed["release"]) == (False, None)
    assert [s["passed"] for s in failed["steps"]] == [True, True, True, False]
    assert failed["error"]["code"] == "gate-failed"
    json.dumps(failed)


def test_the_table_shows_what_was_measured(go):
    text = table(go())
    assert "stage     artifact" in text
    assert "words 3 words" in text
    assert "ttft_p95_ms 10 ms, limit 20 ms [pass]" in text


def test_what_a_run_leaves_for_people(go, store):
    said = io.StringIO()
    result = go(said=said)
    assert "words: 3/3 words" in said.getvalue()
    assert (store.workdir / "latest/shrink").resolve() == result.steps[1].artifact.path.resolve()
    run_id = (store.workdir / "runs/latest").read_text().strip()
    lines = (store.workdir / "runs" / run_id / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [e["stage"] for e in events if e["event"] == "start"] == [
        "make",
        "shrink",
        "assemble",
        "probe",
        "pack",
    ]
    assert events[-1] == {**events[-1], "event": "end", "passed": True}
    assert events[0]["at"].endswith("Z")


def test_a_manifest_has_no_clock_host_path_or_secret(go, tmp_path):
    source = tmp_path / "source.txt"
    source.write_text("text")
    result = go("shrink.token=hunter2", model=str(source))
    for step in result.steps:
        manifest = step.artifact.file("manifest.json").read_text()
        assert str(tmp_path) not in manifest
        assert "hunter2" not in manifest + step.artifact.file("run.json").read_text()
    record = json.loads(result.steps[0].artifact.file("run.json").read_text())
    assert record["params"]["model"] == str(source)
    assert record["peak_rss_bytes"] > 1e6
    everything = [p for p in (tmp_path / "work").rglob("*") if p.is_file()]
    assert not [p for p in everything if b"hunter2" in p.read_bytes()]


def test_damaged_cached_work_is_made_again(go, trace, store):
    result = go()
    trace()
    weights = result.steps[1].artifact.file("weights.bin")
    weights.chmod(0o644)
    weights.write_bytes(b"?" + weights.read_bytes()[1:])
    said = io.StringIO()
    again = go(said=said)
    assert trace() == ["shrink", "judge"]
    assert "is damaged: the checksum of weights.bin differs" in said.getvalue()
    assert [s.artifact.digest for s in again.steps] == [s.artifact.digest for s in result.steps]
    assert all(store.damage(a) is None for a in store.artifacts())


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("disk", "disk-full", "no space left to write weights.bin"),
        ("serialize", "disk-full", "no space left on the disk"),
        ("memory", "out-of-memory", "memory ran out"),
    ],
)
def test_a_lacking_machine_is_one_clear_error(go, store, how, code, words):
    result = go(f"shrink.fail={how}")
    assert result.error.exit_code == 6
    assert result.error.code == code
    assert words in result.error.render()
    assert [s.name for s in result.steps] == ["make"]
    assert not any((store.workdir / "tmp").iterdir())
    assert {a.manifest.step for a in store.artifacts()} == {"make"}
    assert go().error is None  # goes on from there


def test_a_bug_is_not_hidden(go, store):
    with pytest.raises(TypeError, match="a bug of this step"):
        go("shrink.fail=bug")
    assert not any((store.workdir / "tmp").iterdir())


def test_inputs_from_the_store(go, store):
    first = go("shrink.group_size=32")
    store.tag("last", first.steps[2].artifact)
    result = go("probe.baseline_engine=ref:last")
    assert result.error is None
    digest = read_artifact(result.steps[3].artifact.path).manifest.inputs["baseline_engine"]
    assert digest == first.steps[2].artifact.digest
    with pytest.raises(UsageError, match="wrong-kind"):
        raise go("probe.baseline_engine=ref:" + first.steps[0].artifact.digest).error


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"),
        ("/models/My Model/", "My-Model"),
        ("meta/Llama-3.1-8B", "Llama-3.1-8B"),
        ("https://host/a/model.Q4.gguf?x=1", "model.Q4"),
        ("./m.gguf", "m"),
    ],
)
def test_model_names(model, name):
    assert model_name(model) == name


def test_one_step_alone(store, tmp_path, trace):
    plain = tmp_path / "My-Model"
    plain.mkdir()
    (plain / "config.json").write_text('{"architectures": ["A"]}')
    display = Lines(io.StringIO())
    out = tmp_path / "out"
    result = run_step(fake_steps.Shrink(checkpoint=str(plain), mode="slow"), store, display, out=out)
    assert json.loads((out / "config.json").read_text()) == {"g": 64, "mode": "slow"}
    assert read_artifact(out).digest == result.artifact.digest
    assert sorted(p.name for p in plain.iterdir()) == ["config.json"]
    again = run_step(
        fake_steps.Shrink(checkpoint=str(plain), mode="slow"), store, display, out=tmp_path / "two"
    )
    assert again.cached
    engine = run_step(fake_steps.Assemble(checkpoint=str(out)), store, display)
    gate = {"limits": {"ttft_p95_ms": 5.0}, "missing_baseline": "bootstrap"}
    failed = run_step(
        fake_steps.Probe(engine=engine.artifact.digest[:8]),
        store,
        display,
        out=tmp_path / "report",
        gate=gate,
        render=fake_steps.render,
    )
    assert failed.error.exit_code == 3
    assert Report.read(tmp_path / "report").findings[0].text == "measured for My-Model"
    with pytest.raises(UsageError, match="exists and is not an artifact"):
        run_step(fake_steps.Shrink(checkpoint=str(plain)), store, display, out=plain)
    trace()


def test_the_model_is_named_after_what_the_first_step_was_told(store, tmp_path):
    display = Lines(io.StringIO())
    made = run_step(fake_steps.Make(model="org/Some-Model"), store, display)
    engine = run_step(fake_steps.Assemble(checkpoint=str(made.artifact.path)), store, display)
    report = run_step(
        fake_steps.Probe(engine=str(engine.artifact.path)),
        store,
        display,
        gate={"limits": {}},
        render=fake_steps.render,
    )
    assert report.report.findings[0].text == "measured for Some-Model"
    assert store.run_record(report.artifact)["model"] == "Some-Model"
    latest = store.workdir / "latest"
    assert sorted(link.name for link in latest.iterdir()) == ["assemble", "make", "probe"]
    assert (latest / "probe").resolve() == report.artifact.path.resolve()
    assert (store.workdir / "reports" / "probe" / "report.json").is_file()
