"""Pairs are the default while the baseline's engine is at hand; stored runs decide otherwise."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from test_compare_judge import commit, judged, run, said, side

from delivery.device import fingerprint
from delivery.gate import Verdict
from delivery.gate import baseline as baselines
from delivery.report.comparison_baseline import place_of
from delivery.steps.compare import Compare

__all__ = ["judged"]
OURS, BASE, OLDER = "c" * 64, "b" * 64, "a" * 64


@pytest.fixture
def around(tmp_path):
    """What the runner tells Compare; the baseline is of `engine`, measured beside `partner`."""

    def make(engine=BASE, partner=None, name="demo", recorded=True):
        workload = Compare()._workload()
        device = fingerprint("cpu")
        place = place_of(
            "demo",
            {
                "device": asdict(device),
                "device_slug": device.slug,
                "workload": {"name": name, **workload.to_json()},
                "sides": {"candidate": {"runtime": "deliver"}},
            },
        )
        if recorded:
            taken = baselines.Snapshot(engine=engine, reason="r", runs=(), measurement="m" * 64)
            made = baselines.new(
                "demo", asdict(device), place.workload, place.workload_digest, taken, bootstrapped=False
            )
            baselines.write(place.path(tmp_path / "committed"), made)
        return SimpleNamespace(
            model="demo",
            device="cpu",
            baselines=tmp_path / "committed",
            local_baselines=tmp_path / "local",
            inputs={"engine": OURS},
            made_from=lambda digest: {"baseline_engine": partner} if partner and digest == "m" * 64 else {},
        )

    return make


def test_the_baselines_engine_is_the_partner(around):
    assert Compare().partners(around()) == {"baseline_engine": BASE}
    assert Compare().partners(around(name="the same load by another name")) == {"baseline_engine": BASE}


def test_there_is_none_without_a_baseline_or_for_a_server_or_when_told_so(around):
    assert Compare().partners(around(recorded=False)) == {}
    ctx = around()
    assert Compare(paired="off").partners(ctx) == {}
    assert Compare(runtime="http://gpu:8000").partners(ctx) == {}
    assert Compare(results=("bench.json",)).partners(ctx) == {}


def test_an_engine_that_became_the_baseline_keeps_its_own_partner(around):
    assert Compare().partners(around(engine=OURS, partner=OLDER)) == {"baseline_engine": OLDER}
    assert Compare().partners(around(engine=OURS)) == {}


def test_pairs_with_the_baselines_engine_say_since_which_commit(judged):
    commit(judged, side(), engine="bbbb")
    report = judged(side(0, slower=1.2), side(0), partner="bbbb" * 20)
    assert report.verdict is Verdict.FAIL
    assert report.details["baseline"]["commit"] == "c" * 40
    assert report.details["runs"] == "5 pairs of 130 requests"


def test_the_measurement_that_was_accepted_is_not_compared_with_itself(judged):
    """However noisy it was: somebody accepted it. Targets and the last release still decide."""
    loud = replace(side(0), runs=tuple(run(i, 1.0 + 0.4 * (i % 2)) for i in range(5)))
    before = judged(loud, gate={"missing_baseline": "bootstrap"})
    path = next((judged.root / "local").rglob("*.json"))
    stored = baselines.read(path)
    committed = judged.root / "committed" / path.relative_to(judged.root / "local")
    baselines.write(committed, replace(stored, bootstrapped=False))
    report = judged(loud)
    assert report.verdict is Verdict.PASS
    assert "this measurement is the baseline" in said(report)
    assert before.subject == report.subject
    strict = judged(loud, gate={"slo": {"ttft_p95_ms": 1.0}})
    assert strict.verdict is Verdict.FAIL
    assert judged(side(50), engine="e2").verdict is not Verdict.FAIL


def test_a_baseline_that_moved_on_decides_from_its_stored_runs(judged):
    """An accepted slow-down is not rejected again by the pairs that it was seen in."""
    slow = side(0, slower=1.2)
    commit(judged, slow, engine="e1", reason="accepted")
    again = judged(slow, side(0), partner="b" * 64)
    assert again.verdict is Verdict.PASS, said(again)
    assert again.details["runs"] == "5 runs of 130 requests"
    assert again.details["baseline"]["reason"] == "accepted"
    named = judged(slow, side(0), partner="b" * 64, baseline_engine="b" * 64, digest="named")
    assert named.verdict is Verdict.FAIL
