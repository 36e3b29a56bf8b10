"""What somebody would try, or what a broken file holds: nothing of it may pass by accident."""

import math
from dataclasses import replace
from datetime import date

import numpy as np
import pytest

from delivery.errors import UsageError
from delivery.gate import Report, Verdict, compare_latency, compare_memory, waivers
from delivery.gate.alarm import coarse_alarm
from delivery.gate.limits import parse_bound, parse_target
from delivery.gate.metrics import METRICS, NEVER_BOUNDED, UNDER_LOAD, latency_kind
from delivery.gate.report import Metric
from delivery.report import timings
from delivery.report.quality import unmatched

TODAY = date(2026, 11, 30)
MEMORY = {"weights_bytes": 1e8, "peak_bytes": 5e7, "kv_tokens": 4096}
NOT_NUMBERS = [float("nan"), float("inf"), -1.0]


def runs(factor=1.0, size=130, count=5):
    rng = np.random.default_rng(7)
    return [list(np.exp(rng.normal(3, 0.1, size)) * factor) for _ in range(count)]


@pytest.mark.parametrize("floor", NOT_NUMBERS)
def test_a_floor_that_is_no_number_hides_no_loss(floor):
    with pytest.raises(ValueError, match="a floor is a number of ms"):
        compare_latency(runs(), runs(2.0), floor_ms=floor)
    with pytest.raises(ValueError, match="a floor is a number of bytes"):
        compare_memory(MEMORY, {**MEMORY, "weights_bytes": 2e8}, floor_bytes=floor)


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), 1.0, 0.5])
def test_a_limit_that_nothing_can_break_is_refused(limit):
    with pytest.raises(ValueError, match="a limit on a ratio is above 1 and finite"):
        compare_latency(runs(), runs(2.0), limit=limit)


@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 0, -5, "100", True])
@pytest.mark.parametrize("both", [True, False])
def test_a_number_of_memory_that_is_none_is_invalid(name, value, both):
    spoiled = {**MEMORY, name: value}
    verdict = compare_memory(spoiled if both else MEMORY, spoiled)
    assert verdict.status is Verdict.INVALID
    assert "KV tokens" in verdict.reason if name == "kv_tokens" else name in verdict.reason


def test_numpy_s_numbers_are_numbers():
    ours = {"weights_bytes": np.int64(10**8), "peak_bytes": np.float64(5e7), "kv_tokens": np.int32(4096)}
    assert compare_memory(MEMORY, ours).status is Verdict.PASS


@pytest.mark.parametrize(
    "value",
    [
        *NOT_NUMBERS[:2],
        True,
        "1.1",
        None,
        [1],
        {},
        {"min": "a"},
        {"max": math.nan},
        {"min": None},
        {"max": True},
    ],
)
def test_a_bound_that_would_never_be_broken_is_refused(value):
    with pytest.raises(UsageError, match="the limit of perplexity_ratio is not valid"):
        parse_bound("perplexity_ratio", value)


def test_a_range_that_holds_nothing_is_refused():
    with pytest.raises(UsageError) as caught:
        parse_bound("weights_bytes", {"min": 2, "max": 1})
    assert "nothing lies between 2 and 1" in caught.value.render()


def waiver(**changes):
    made = {"metric": "tpot_p95_ms", "owner": "ann@example.org", "reason": "known", "expires": "2026-12-31"}
    return {**made, **changes}


def failed(*metrics, **details):
    return Report("compare", "s" * 64, Verdict.FAIL, metrics, details=details)


SLOW = Metric("tpot_p95_ms", 5.0, "ms", "lower", 4.0, "fail", 3.0, (4.0, 6.0))


@pytest.mark.parametrize("beside", ["invalid", "inconclusive"])
def test_what_cannot_be_waived_stays_when_the_failure_beside_it_is_waived(beside):
    undecided = Metric("weights_bytes", 1.0, "bytes", "both", status=beside)
    for report in (failed(SLOW, undecided), failed(SLOW, besides=beside)):
        assert waivers.apply(report, [waiver()], TODAY).verdict == beside
    for report in (failed(SLOW), failed(SLOW, besides="pass"), failed(SLOW, besides="bootstrapped")):
        assert waivers.apply(report, [waiver()], TODAY).verdict is Verdict.WAIVED


def test_a_waiver_without_a_corpus_holds_for_every_corpus_as_a_limit_does():
    legal = Metric("legal_kl_nats", 1.0, "nats", "lower", 0.3, "fail")
    technical = replace(legal, name="technical_kl_nats")
    report = failed(legal, technical)
    assert waivers.apply(report, [waiver(metric="kl_nats")], TODAY).verdict is Verdict.WAIVED
    assert waivers.apply(report, [waiver(metric="legal_kl_nats")], TODAY).verdict is Verdict.FAIL


def test_an_expired_waiver_and_one_of_another_check_do_nothing():
    assert waivers.apply(failed(SLOW), [waiver(expires="2026-11-29")], TODAY).verdict is Verdict.FAIL
    assert waivers.apply(failed(SLOW), [waiver(check="smoke")], TODAY).verdict is Verdict.FAIL
    assert waivers.apply(failed(SLOW), [waiver(expires="2026-11-30")], TODAY).verdict is Verdict.WAIVED
    with pytest.raises(UsageError, match="no metric"):
        waivers.apply(failed(SLOW), [waiver(metric="nope")], TODAY)


@pytest.mark.parametrize("name", sorted(NEVER_BOUNDED))
def test_a_limit_that_no_check_keeps_is_refused(name):
    with pytest.raises(UsageError, match="cannot be limited") as caught:
        parse_target(name, {"max": 1.0}, under_load=False)
    assert caught.value.code == "metric-not-gated"


def test_a_target_under_load_is_measured_under_load():
    assert parse_target("output_throughput", 50.0, under_load=True).low == 50.0
    assert parse_target("weights_bytes", {"max": 9e7}, under_load=True).high == 9e7
    for name in ("perplexity", "legal_perplexity", "smoke_p95_ms", "itl_p95_ms", "load_s"):
        with pytest.raises(UsageError, match="cannot be a target under load"):
            parse_target(name, 1.0, under_load=True)
    assert parse_target("legal_perplexity", 1.0, under_load=False).high == 1.0


@pytest.mark.parametrize("name", ["ttft_p0_ms", "ttft_p90_ms", "ttft_p999_ms", "tpot_p_ms"])
def test_a_percentile_that_nobody_measures_is_refused_before_the_measurement(name):
    with pytest.raises(UsageError, match="not a latency metric"):
        latency_kind(name)


def test_every_metric_is_somebody_s():
    """Judged by compare, smoke or evaluate, or said to be shown only."""
    smoke = {n for n in METRICS if n.startswith("smoke_")} | {"load_s", "process_bytes", "planned_bytes"}
    evaluate = {d.name for d in METRICS.values() if d.per_corpus} | {"bleu4_ratio"}
    parts = [UNDER_LOAD, NEVER_BOUNDED, smoke, evaluate]
    assert set().union(*parts) == set(METRICS)
    assert sum(map(len, parts)) == len(METRICS)


def test_a_mistyped_corpus_in_a_limit_is_told():
    measured = [Metric("legal_perplexity", 9.0, "ppl", "lower")]
    limits = {"legall_perplexity": 12, "legal_perplexity": 12, "perplexity": 12, "tpot_p95_ms": 5}
    told = unmatched(limits, measured)
    assert [f.text.split()[2] for f in told] == ["legall_perplexity"]


def test_absolute_limits_hold_for_the_timed_runs_of_smoke():
    ours = [100.0] * 10
    assert [m.status for m in timings.metrics(ours)] == ["shown", "shown"]
    limited = timings.metrics(ours, limits={"smoke_p95_ms": 50, "smoke_p50_ms": 200})
    assert [(m.status, m.limit) for m in limited] == [("pass", 200), ("fail", 50)]
    alarm = coarse_alarm(ours, ours)
    beside = timings.metrics(ours, ours, 1.15, alarm, {"smoke_p95_ms": 50})
    assert [m.status for m in beside] == ["pass", "fail"]
