"""compare judges a measurement: baselines, bootstrap, memory, the last release, targets. No engine runs."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from delivery.artifact import Artifact, Kind, Manifest
from delivery.bench.comparison import MEASUREMENT
from delivery.bench.disturbance import Disturbance
from delivery.bench.measured import Measured, Side, snapshot
from delivery.bench.plan import offered_rate
from delivery.bench.workload import load_workload
from delivery.device import DeviceFingerprint
from delivery.errors import BaselineError, UsageError
from delivery.gate import RequestRecord, Verdict
from delivery.gate import baseline as baselines
from delivery.report import render
from delivery.report.comparison import Judge
from delivery.report.comparison_baseline import place_of
from delivery.report.headline import headline
from delivery.report.latencies import values_of
from delivery.steps.compare import Compare

MEMORY = {
    "weights_bytes": 1e8,
    "peak_bytes": 6e7,
    "kv_bytes": 3e7,
    "overhead_bytes": 1e6,
    "kv_tokens": 1024.0,
    "process_bytes": 5e8,
    "resident_bytes": 4e8,
    "drift_ratio": 0.01,
}
WORKLOAD = load_workload("demo")


def run(seed, slower=1.0, size=130, noise=0.02):
    rng = np.random.default_rng(seed)
    out = []
    for i in range(size):
        first = (0.3 + rng.gamma(4, 0.01)) * slower * np.exp(rng.normal(0, noise))
        last = first + 7 * 0.05 * slower * np.exp(rng.normal(0, noise))
        start = i * 0.1
        out.append(RequestRecord(f"r{i}", start, start, start + first, start + last, 16, 8))
    return tuple(out)


def side(seed=0, slower=1.0, *, count=5, disturbance=None, runtime="deliver", **memory):
    found = None if memory.get("none") else {**MEMORY, **memory}
    return Side(
        runs=tuple(run(seed + i, slower) for i in range(count)),
        disturbances=(disturbance or Disturbance(),) * count,
        memory=found,
        runtime=runtime,
        load_s=2.5,
        settings={"device": "cpu", "kv": "auto", "block_size": 64},
    )


@pytest.fixture
def judged(tmp_path):
    """Judge a candidate as the runner would; folders and the model stay the same between calls."""

    def judge(
        candidate, baseline=None, *, gate=None, engine="e1", cores=2, digest=None, partner="b" * 64, **params
    ):
        asked = WORKLOAD.with_arrival(rate=params.get("rate"))
        folder = tmp_path / f"measurement-{engine}-{digest}"
        folder.mkdir(exist_ok=True)
        made = Measured(candidate, baseline)
        made.write(folder)
        device = DeviceFingerprint("cpu", "Test CPU", cores=cores)
        data = {
            "device": asdict(device),
            "device_slug": device.slug,
            "versions": {"deliver": "0", "torch": "2"},
            "engine": engine * 20,
            "baseline_engine": partner if baseline else None,
            "workload": {"name": "demo", **asked.to_json()},
            "kv_tokens": 1024,
            "offered_rate": offered_rate(asked),
            **made.to_json(),
        }
        (folder / MEASUREMENT).write_text(json.dumps(data))
        manifest = Manifest(Kind.REPORT, "compare", 1, params={"m": digest or engine})
        ctx = SimpleNamespace(
            measurement=Artifact(folder, manifest),
            out=folder,
            model="demo",
            gate={"missing_baseline": "fail", **(gate or {})},
            baselines=tmp_path / "committed",
            local_baselines=tmp_path / "local",
            input=lambda role: SimpleNamespace(digest={"engine": engine * 20}.get(role, "b" * 64)),
            has=lambda role: role == "engine" or baseline is not None,
        )
        report = Compare(**params).judge(ctx)
        render(report, folder)
        report.write(folder)
        judge.made[report.subject] = Artifact(folder, manifest)
        return report

    judge.root, judge.made = tmp_path, {}
    judge.artifact = lambda report: judge.made[report.subject]
    return judge


def commit(judged, candidate, *, released=False, engine="old", reason="accepted", rate=None):
    """What `deliver baseline update` does with a measurement."""
    device = DeviceFingerprint("cpu", "Test CPU", cores=2)
    data = {
        "device": asdict(device),
        "device_slug": device.slug,
        "versions": {},
        "engine": engine * 20,
        "workload": {"name": "demo", **WORKLOAD.with_arrival(rate=rate).to_json()},
        "sides": {"candidate": {"runtime": candidate.runtime}},
    }
    place = place_of("demo", data)
    taken = snapshot(
        data,
        candidate,
        values_of(candidate.runs),
        reason=reason,
        commit="c" * 40,
        recorded="2026-01-01",
        measurement="m",
    )
    path = place.path(judged.root / "committed")
    if path.is_file():
        made = baselines.read(path).updated(taken, released=released)
    else:
        made = baselines.new(
            "demo", place.device, place.workload, place.workload_digest, taken, bootstrapped=False
        )
    baselines.write(path, made)
    return path


def metric(report, name):
    return next(m for m in report.metrics if m.name == name)


def said(report):
    return " ".join(f.text for f in report.findings)


def test_without_a_baseline_ci_stops_with_exit_5(judged):
    with pytest.raises(BaselineError, match="no baseline of demo") as caught:
        judged(side())
    assert caught.value.exit_code == 5
    assert not (judged.root / "local").exists()


def test_a_bootstrapped_baseline_stays_bootstrapped_when_judged_again(judged):
    gate = {"missing_baseline": "bootstrap"}
    first = judged(side(), gate=gate)
    assert first.verdict is Verdict.BOOTSTRAPPED
    assert "became the baseline" in said(first)
    again = judged(side(), gate=gate)
    assert again.verdict is Verdict.BOOTSTRAPPED
    assert metric(first, "output_throughput").status == "shown"
    other = judged(side(50), gate=gate, engine="e2")
    assert other.verdict is Verdict.PASS
    assert other.details["baseline"]["reason"] == "first measurement"


def test_a_measurement_that_is_worthless_becomes_no_baseline(judged):
    gate = {"missing_baseline": "bootstrap"}
    loud = judged(side(disturbance=Disturbance(foreign_cpu_ratio=0.8)), gate=gate)
    assert loud.verdict is Verdict.INVALID
    assert "other processes used 80%" in said(loud)
    assert judged(side(disturbance=Disturbance(swapped_pages=4)), gate=gate).verdict is Verdict.INVALID
    assert judged(side(count=5), gate=gate, foreign_limit=0.9).verdict is Verdict.BOOTSTRAPPED


def test_a_failed_measurement_becomes_no_baseline(judged):
    gate = {"missing_baseline": "bootstrap"}
    slow = judged(side(), gate={**gate, "slo": {"ttft_p95_ms": 1.0}})
    assert slow.verdict is Verdict.FAIL
    assert "does not become the baseline" in said(slow)
    assert not (judged.root / "local").exists()
    assert judged(side(), gate=gate).verdict is Verdict.BOOTSTRAPPED
    assert len(list((judged.root / "local").rglob("*.json"))) == 1


def test_failed_requests_are_invalid_before_anything_is_compared(judged):
    broken = side()
    runs = (*broken.runs[:4], (replace(broken.runs[4][0], error="reset"), *broken.runs[4][1:]))
    report = judged(replace(broken, runs=runs), gate={"missing_baseline": "bootstrap"})
    assert report.verdict is Verdict.INVALID
    assert "run 5: 1 of 130 requests failed" in said(report)


def test_against_a_stored_baseline_a_slow_down_fails_and_equal_speed_passes(judged):
    commit(judged, side())
    assert judged(side(50)).verdict is Verdict.PASS
    slow = judged(side(50, slower=1.3), engine="e2")
    assert slow.verdict is Verdict.FAIL
    tpot = metric(slow, "tpot_p95_ms")
    assert tpot.status == "fail"
    assert tpot.value / tpot.baseline == pytest.approx(1.3, rel=0.05)
    assert tpot.interval[0] > tpot.baseline
    answers = dict(headline(slow).answers)
    assert "Time per output token, P95" in [w.what for w in headline(slow).worse]
    assert "Seen" not in answers  # nothing is said twice
    assert "accepted" in answers["Since"]
    assert headline(slow).command.startswith("deliver compare --engine e2e2e2e2e2e2")
    assert judged(side(50, slower=1.3), engine="e2", limit=1.5).verdict is Verdict.PASS


def test_a_baseline_of_another_device_is_exit_5_in_ci_and_a_second_one_locally(judged):
    commit(judged, side())
    with pytest.raises(BaselineError, match="measured on another device"):
        judged(side(), cores=4)
    report = judged(side(), cores=4, gate={"missing_baseline": "bootstrap"})
    assert report.verdict is Verdict.BOOTSTRAPPED
    assert "which cannot be compared with" in said(report)


@pytest.mark.parametrize("change", [0.12, -0.12])
@pytest.mark.parametrize(
    ("part", "gate_name"), [("weights_bytes", "weights_bytes"), ("peak_bytes", "peak_bytes")]
)
def test_memory_outside_ten_percent_fails_both_ways(judged, part, gate_name, change):
    commit(judged, side())
    report = judged(side(50, **{part: MEMORY[part] * (1 + change)}), memory_floor_bytes=0)
    assert report.verdict is Verdict.FAIL
    assert metric(report, gate_name).status == "fail"
    assert "memory:" in said(report)


def test_other_kv_tokens_make_memory_invalid(judged):
    commit(judged, side())
    report = judged(side(50, kv_tokens=2048.0))
    assert report.verdict is Verdict.INVALID
    assert "equal number of KV tokens" in said(report)


def test_small_losses_add_up_against_the_last_release(judged):
    commit(judged, side(), released=True, engine="rel")
    commit(judged, side(20, slower=1.12), engine="c1")
    report = judged(side(40, slower=1.24), engine="c2")
    assert report.verdict is Verdict.FAIL
    assert "against the last release" in said(report)
    since = headline(report)
    assert "commit cccc" in dict(since.answers)["Since"]
    assert report.details["baseline"]["engine"].startswith("rel")
    assert "against the last release" in dict(since.answers)["Seen"]
    assert judged(side(40, slower=1.12), engine="c3").verdict is Verdict.PASS


def test_memory_that_creeps_is_held_against_the_last_release_too(judged):
    commit(judged, side(), released=True, engine="rel")
    commit(judged, side(20, weights_bytes=1.4e8), engine="c1")
    report = judged(side(40, weights_bytes=1.45e8), engine="c2")
    assert report.verdict is Verdict.FAIL
    assert metric(report, "weights_bytes").baseline == MEMORY["weights_bytes"]
    assert "against the last release (cccccccccccc): memory: weights_bytes" in said(report)
    assert judged(side(40, weights_bytes=1.05e8), engine="c3").verdict is Verdict.FAIL  # 25 % under c1


def test_unequal_output_lengths_between_runs_are_invalid_with_or_without_a_baseline(judged):
    made = side(50)
    uneven = replace(made.runs[1][7], output_tokens=7)
    made = replace(made, runs=(made.runs[0], (*made.runs[1][:7], uneven, *made.runs[1][8:]), *made.runs[2:]))
    report = judged(made, gate={"missing_baseline": "bootstrap"})
    assert report.verdict is Verdict.INVALID
    assert "r7 has 8 tokens in run 1 and 7 in run 2" in said(report)
    assert not (judged.root / "local").exists()


def test_pairs_need_no_stored_baseline_and_name_their_look(judged):
    base = side(0)
    equal = judged(side(0), base)
    assert equal.verdict is Verdict.PASS
    assert metric(equal, "tpot_p95_ms").value == metric(equal, "tpot_p95_ms").baseline
    slow = judged(side(0, slower=1.2), base, engine="e2")
    assert slow.verdict is Verdict.FAIL
    assert slow.details["runs"] == "5 pairs of 130 requests"
    assert dict(headline(slow).answers)["Measured"].endswith("workload demo, on Test CPU, 2 cores")
    assert "--baseline-engine" in slow.details["reproduce"]


def test_a_url_has_no_memory_and_is_named_as_what_was_measured(judged):
    commit(judged, side(none=True, runtime="vllm"))
    report = judged(side(50, none=True, runtime="vllm"), runtime="http://gpu:8000")
    assert report.verdict is Verdict.PASS
    assert report.details["runtime"] == "vllm"
    assert "memory cannot be seen" in said(report)


def test_another_runtime_has_another_baseline(judged):
    commit(judged, side())
    with pytest.raises(BaselineError, match="no baseline"):
        judged(side(none=True, runtime="vllm"))


def test_targets_are_absolute(judged):
    commit(judged, side())
    slo = {"slo": {"ttft_p95_ms": 100.0, "output_throughput": 1.0, "memory_drift_ratio": 0.05}}
    report = judged(side(50), gate=slo)
    assert report.verdict is Verdict.FAIL
    assert metric(report, "ttft_p95_ms").status == "fail"
    assert metric(report, "output_throughput").status == "pass"
    assert metric(report, "memory_drift_ratio").status == "pass"
    assert "target ≤ 100 ms" in said(report)
    drifting = judged(side(50, drift_ratio=0.06), gate={"slo": {"memory_drift_ratio": 0.05}}, engine="e2")
    assert drifting.verdict is Verdict.FAIL


def test_the_family_is_the_pipelines(judged):
    commit(judged, side())
    report = judged(side(50), gate={"metrics": ["tpot_p95_ms"]})
    assert metric(report, "tpot_p95_ms").status == "pass"
    assert metric(report, "ttft_p95_ms").status == "shown"
    with pytest.raises(UsageError, match="cannot be gated"):
        judged(side(50), gate={"metrics": ["itl_p95_ms"]}, engine="e3")


def test_the_self_test_is_part_of_the_report_when_asked_for(judged):
    commit(judged, side())
    report = judged(side(50), self_test=True)
    assert report.verdict is Verdict.PASS
    assert metric(report, "self_test_missed").value == 0
    assert "injected changes were judged correctly" in said(report)


def test_the_self_test_of_a_baseline_without_memory_injects_latencies_only(judged):
    commit(judged, side(none=True, runtime="vllm"))
    report = judged(side(50, none=True, runtime="vllm"), self_test=True)
    assert report.verdict is Verdict.PASS
    assert metric(report, "self_test_missed").value == 0
    assert "no memory to change; latencies only" in said(report)


def test_noise_is_warned_about(judged):
    loud = replace(side(), runs=tuple(run(i, 1.0 + 0.12 * i) for i in range(5)))
    report = judged(loud, gate={"missing_baseline": "bootstrap"})
    assert "differs by" in said(report)


def test_a_report_holds_charts_and_evidence(judged):
    commit(judged, side())
    report = judged(side(50))
    assert {c["kind"] for c in report.details["charts"]} == {"distribution", "pairs", "stack", "line"}
    trend = next(c for c in report.details["charts"] if c["kind"] == "line")
    assert trend["labels"] == ["ccccccc", "now"]
    assert all(line["values"][0] == 100.0 for line in trend["series"])
    assert "runs/candidate-4.jsonl" in report.evidence
    assert metric(report, "load_s").value == 2.5


def test_a_measurement_survives_its_files(tmp_path):
    made = Measured(side(0), side(9))
    made.write(tmp_path)
    assert Measured.read(tmp_path, json.loads(json.dumps(made.to_json()))) == made


def test_the_place_does_not_depend_on_the_workloads_name():
    device = asdict(DeviceFingerprint("cpu", "x"))
    data = {
        "device": device,
        "device_slug": "x",
        "workload": {"name": "a", **WORKLOAD.to_json()},
        "sides": {"candidate": {"runtime": "deliver"}},
    }
    renamed = {**data, "workload": {**data["workload"], "name": "b"}}
    assert place_of("m", data) == place_of("m", renamed)


def test_fewer_than_five_runs_are_refused():
    with pytest.raises(UsageError, match="--runs is 3"):
        Compare(runs=3).check()


def test_judging_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; from delivery.steps.compare import Compare; import delivery.report.comparison;"
        "from delivery.steps.smoke import Smoke; from delivery.steps.evaluate import Evaluate;"
        "import delivery.report.quality, delivery.report.answers;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert Judge


def test_a_waived_loss_of_speed_does_not_let_memory_pass_that_was_not_comparable(judged):
    from datetime import date

    from delivery.gate import waivers

    commit(judged, side())
    report = judged(side(50, slower=1.3, kv_tokens=2048.0))
    assert report.verdict is Verdict.FAIL
    told = [
        {"metric": name, "owner": "Ann", "reason": "known", "expires": "2099-01-01"}
        for name in ("ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms")
    ]
    assert waivers.apply(report, told, date(2026, 1, 1)).verdict is Verdict.INVALID


def test_absolute_limits_hold_for_memory_too(judged):
    commit(judged, side())
    small = {"limits": {"weights_bytes": {"max": 9e7}}}
    report = judged(side(50), gate=small)
    assert report.verdict is Verdict.FAIL
    assert metric(report, "weights_bytes").status == "fail"
    assert metric(report, "weights_bytes").limit == 9e7
    assert judged(side(50), gate={"limits": {"weights_bytes": {"max": 2e8}}}).verdict is Verdict.PASS
    first = judged(side(50), engine="e2", cores=8, gate={**small, "missing_baseline": "bootstrap"})
    assert first.verdict is Verdict.FAIL


def test_a_name_may_have_a_limit_and_a_target_and_both_hold(judged):
    commit(judged, side())
    narrow, wide = {"weights_bytes": {"max": 5e7}}, {"weights_bytes": {"max": 5e8}}
    for gate in ({"limits": narrow, "slo": wide}, {"limits": wide, "slo": narrow}):
        assert judged(side(50), gate=gate).verdict is Verdict.FAIL
    assert judged(side(50), gate={"limits": wide, "slo": wide}).verdict is Verdict.PASS


def test_a_slow_down_of_the_baselines_own_engine_is_called_the_machines(judged):
    commit(judged, side(), engine="e1")
    slower = judged(side(50, slower=1.3), engine="e1")
    assert slower.verdict is Verdict.FAIL
    assert "this engine is the baseline's own" in said(slower)
    assert "baseline's own" not in said(judged(side(50), engine="e1"))
    assert "baseline's own" not in said(judged(side(50, slower=1.3), engine="e2"))


def test_a_bound_below_is_named_as_one(judged):
    commit(judged, side())
    bounds = {"weights_bytes": {"min": 5e8, "max": 9e9}, "ttft_p95_ms": {"min": 1000.0}}
    report = judged(side(50), gate={"limits": bounds})
    assert report.verdict is Verdict.FAIL
    assert metric(report, "weights_bytes").limit == 5e8
    assert "Weights is 95.37 MiB, target ≥ 476.8 MiB" in said(report)
    assert "target ≥ 1,000 ms" in said(report)


def test_a_limit_on_what_was_not_measured_says_that_it_has_no_effect(judged):
    ours = side(none=True, runtime="vllm")
    commit(judged, ours)
    report = judged(ours, gate={"limits": {"weights_bytes": {"max": 1.0}, "kl_nats": 0.1}})
    assert report.verdict is Verdict.PASS
    assert "the limit weights_bytes has no effect here" in said(report)
    assert "kl_nats" not in said(report)


def test_memory_that_cannot_be_compared_with_the_last_release_is_told(judged):
    commit(judged, side(), released=True, engine="rel")
    commit(judged, side(20, kv_tokens=2048.0), engine="c1")
    report = judged(side(40, kv_tokens=2048.0), engine="c2")
    assert report.verdict is Verdict.PASS
    assert "against the last release (cccccccccccc): pass" in said(report)
    assert "against the last release (cccccccccccc): memory: the KV cache holds 2048 tokens" in said(report)


@pytest.mark.parametrize("target", ["request_capacity", "weights_bytes", "memory_drift_ratio"])
def test_a_target_that_was_not_measured_is_not_met(judged, target):
    """What an engine can sustain is not looked for in a closed loop, its memory not seen through a URL."""
    ours = side(none=True, runtime="vllm")
    commit(judged, ours)
    report = judged(ours, gate={"slo": {target: {"min": 0.0}}})
    assert report.verdict is Verdict.INVALID
    assert f"the target {target} was not measured" in said(report)
