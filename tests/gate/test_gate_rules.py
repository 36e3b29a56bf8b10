"""Metric names, limits, waivers, baselines, noise, summary and the self-test."""

import json
from dataclasses import replace
from datetime import date

import numpy as np
import pytest

from delivery.errors import DataError, UsageError
from delivery.gate import (
    Report,
    RequestRecord,
    Verdict,
    compare_latency,
    compare_memory,
    compare_runs,
    metrics,
    noise,
    waivers,
)
from delivery.gate import baseline as baselines
from delivery.gate.limits import judge, parse_bound
from delivery.gate.report import Metric
from delivery.gate.selftest import self_test
from delivery.gate.summary import summarize
from delivery.report import words

MEMORY = {"weights_bytes": 1e8, "peak_bytes": 5e7, "kv_tokens": 4096}


def run(seed, size=130):
    rng = np.random.default_rng(seed)
    first = 0.2 + rng.gamma(4, 0.01, size)
    last = first + 7 * rng.gamma(20, 0.001, size)
    return [
        RequestRecord(f"r{i}", i * 0.1, i * 0.1, i * 0.1 + first[i], i * 0.1 + last[i], 16, 8)
        for i in range(size)
    ]


RUNS = tuple(tuple(run(i)) for i in range(5))


def test_every_metric_says_its_unit_last_where_it_has_one():
    for name, about in metrics.METRICS.items():
        assert name == about.name
        if about.unit in ("ms", "bytes", "ratio", "tokens", "nats"):
            assert name.endswith(f"_{about.unit}"), name


def test_a_metric_per_corpus_is_known_by_its_name():
    name = metrics.corpus_metric("Customer Support/DE", "kl_nats")
    assert name == "customer_support_de_kl_nats"
    assert metrics.definition(name).name == "kl_nats"
    assert metrics.definition("english_source_perplexity").name == "source_perplexity"
    with pytest.raises(UsageError, match="no metric 'perplexityy'"):
        metrics.definition("perplexityy")


@pytest.mark.parametrize(
    ("name", "value", "bound", "shown", "text"),
    [
        ("weights_bytes", 50.0, {"min": 100, "max": 200}, 100.0, "≥ 100 B"),
        ("weights_bytes", 250.0, {"min": 100, "max": 200}, 200.0, "≤ 200 B"),
        ("weights_bytes", 150.0, {"min": 100, "max": 200}, 200.0, "≤ 200 B"),
        ("weights_bytes", 150.0, {"min": 100}, 100.0, "≥ 100 B"),
        ("perplexity", 2.0, {"min": 3}, 3.0, "≥ 3 ppl"),
        ("perplexity", 5.0, {"min": 3}, 3.0, "≥ 3 ppl"),
        ("perplexity", 5.0, 4, 4.0, "≤ 4 ppl"),
        ("perplexity", float("nan"), 4, 4.0, "≤ 4 ppl"),
        ("bleu4_ratio", 0.9, {"max": 0.8}, 0.8, "≤ 80 %"),
        ("bleu4_ratio", 0.5, 0.8, 0.8, "≥ 80 %"),
        ("bleu4_ratio", float("nan"), 0.8, 0.8, "≥ 80 %"),
        ("bleu4_ratio", 0.8, 0.8, 0.8, "≥ 80 %"),
    ],
)
def test_the_bound_that_is_shown_is_the_one_that_was_left(name, value, bound, shown, text):
    metric = judge(name, value, {name: bound})
    assert metric.limit == shown
    assert words.limit(metric) == text


def test_limits_follow_the_direction_and_prefer_the_corpus():
    assert judge("perplexity_ratio", 1.2, {"perplexity_ratio": 1.1}).status == "fail"
    assert judge("top1_agreement_ratio", 0.99, {"top1_agreement_ratio": 0.9}).status == "pass"
    limits = {"perplexity": 20, "english_perplexity": 30}
    assert judge("english_perplexity", 25, limits).status == "pass"
    assert judge("chinese_perplexity", 25, limits).status == "fail"
    assert judge("kl_nats", 0.1, limits).status == "shown"
    assert judge("bits_per_weight", 4.1, {"bits_per_weight": {"min": 4, "max": 4.6}}).status == "pass"


def test_a_value_that_is_not_finite_fails_even_without_a_limit():
    made = judge("perplexity", float("nan"), {})
    assert made.status == "fail"
    json.dumps(made.value, allow_nan=False)
    assert judge("top1_agreement_ratio", float("inf"), {"top1_agreement_ratio": 0.5}).status == "fail"


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("bits_per_weight", 4, "both directions"),
        ("perplexity", {"maximum": 4}, "did you mean 'max'"),
        ("perplexity", "low", "expected a number"),
        ("perplexity", True, "expected a number"),
    ],
)
def test_a_limit_that_says_nothing_is_refused(name, value, match):
    with pytest.raises(UsageError, match=match):
        parse_bound(name, value)


def failed_report(*names, verdict=Verdict.FAIL):
    made = tuple(Metric(n, 2.0, "x", "lower", 1.0, "fail") for n in names)
    return Report("compare", "0" * 64, verdict, metrics=made)


WAIVER = {"metric": "tpot_p95_ms", "owner": "ana", "reason": "new driver", "expires": "2026-03-31"}


def test_a_waiver_covers_a_named_failure_until_its_last_day():
    report = waivers.apply(failed_report("tpot_p95_ms"), [WAIVER], date(2026, 3, 31))
    assert report.verdict is Verdict.WAIVED
    assert report.verdict.releases
    assert report.metrics[0].status == "waived"
    assert "owner ana: new driver (until 2026-03-31)" in report.findings[0].text


def test_an_expired_waiver_does_nothing_and_says_so():
    report = waivers.apply(failed_report("tpot_p95_ms"), [WAIVER], date(2026, 4, 1))
    assert report.verdict is Verdict.FAIL
    assert report.findings[0].text.startswith("waiver expired: ")


def test_a_waiver_leaves_other_failures_standing():
    report = waivers.apply(failed_report("tpot_p95_ms", "peak_bytes"), [WAIVER], date(2026, 1, 1))
    assert report.verdict is Verdict.FAIL
    assert [m.status for m in report.metrics] == ["waived", "fail"]


def test_an_invalid_measurement_or_another_check_cannot_be_waived():
    invalid = failed_report("tpot_p95_ms", verdict=Verdict.INVALID)
    assert waivers.apply(invalid, [WAIVER], date(2026, 1, 1)).verdict is Verdict.INVALID
    elsewhere = [{**WAIVER, "check": "smoke"}]
    assert waivers.apply(failed_report("tpot_p95_ms"), elsewhere, date(2026, 1, 1)).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"owner": ""}, "no owner"),
        ({"expires": "soon"}, "YYYY-MM-DD"),
        ({"expire": "2026-01-01"}, "did you mean 'expires'"),
        ({"metric": "speed"}, "no metric 'speed'"),
    ],
)
def test_an_incomplete_waiver_is_refused(change, match):
    with pytest.raises(UsageError, match=match):
        waivers.parse({**WAIVER, **change})


def snapshot(reason="first", scale=1.0, **more):
    return baselines.Snapshot(
        engine="e" * 64, reason=reason, runs=RUNS, memory=MEMORY, values={"tpot_p95_ms": 20.0 * scale}, **more
    )


def first_baseline():
    return baselines.new("m", {"name": "cpu"}, {"requests": 130}, "d" * 64, snapshot(), bootstrapped=True)


def test_a_baseline_survives_its_file(tmp_path):
    path = baselines.location(tmp_path, "org/Model 1.5", "cpu-x", "d" * 64)
    assert path.relative_to(tmp_path).parts == ("org-Model-1.5", "cpu-x", "d" * 16 + ".json")
    made = first_baseline()
    baselines.write(path, made)
    again = baselines.read(path)
    assert again == baselines.Baseline.from_json(made.to_json())
    assert again.bootstrapped
    assert again.current.runs[1][3].last_token_s == pytest.approx(RUNS[1][3].last_token_s, abs=1e-6)
    assert sum(line.startswith('    ["r') for line in path.read_text().splitlines()) == 5 * 130


def test_a_reason_is_a_text_whatever_it_says(tmp_path):
    made = first_baseline()
    made = replace(made, current=replace(made.current, reason="@run0@", settings={"x": ["@run0@", '"']}))
    baselines.write(tmp_path / "b.json", made)
    read = baselines.read(tmp_path / "b.json")
    assert (read.current.reason, read.current.settings) == (made.current.reason, made.current.settings)
    assert len(read.current.runs) == len(made.current.runs)


def test_small_steps_do_not_move_the_anchor():
    first = first_baseline()
    second = first.updated(snapshot("faster tokenizer", 1.1), released=False)
    third = second.updated(snapshot("again", 1.2), released=False)
    assert third.anchor == first.current
    assert third.current.reason == "again"
    assert not third.bootstrapped
    assert [row["reason"] for row in third.history] == ["first", "faster tokenizer", "again"]
    assert third.updated(snapshot("release 2"), released=True).anchor is None


@pytest.mark.parametrize("text", ["{", "{}", '{"schema": 99}'])
def test_a_damaged_baseline_is_named(tmp_path, text):
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"b\.json is not a baseline"):
        baselines.read(path)


def test_a_model_name_cannot_leave_the_folder(tmp_path):
    for name in ("../../etc", "..", "", "/root/x"):
        path = baselines.location(tmp_path, name, "cpu", "d" * 64)
        assert path.resolve().is_relative_to(tmp_path)
        assert len(path.relative_to(tmp_path).parts) == 3


def test_baselines_of_other_devices_are_found(tmp_path):
    for device in ("cpu-a", "gpu-b"):
        baselines.write(baselines.location(tmp_path, "m", device, "d" * 64), first_baseline())
    assert baselines.other_devices(tmp_path, "m", "d" * 64, "cpu-a") == ["gpu-b"]
    assert baselines.other_devices(tmp_path, "other", "d" * 64, "cpu-a") == []


def test_noise_gives_the_spread_and_the_smallest_effect():
    quiet = noise.measure([np.full(200, 100.0)] * 5)
    assert quiet.spread == 0.0
    assert quiet.minimum_effect == 0.0
    assert not quiet.noisy
    loud = noise.measure([np.full(200, v) for v in (90.0, 100.0, 111.0, 95.0, 105.0)])
    assert loud.noisy
    assert 0.08 < loud.minimum_effect < 0.20
    with pytest.raises(ValueError, match="two runs"):
        noise.measure([[1.0]])


def test_the_smallest_effect_is_one_that_the_gate_shows_in_four_of_five_cases():
    """The gate's interval is wider than the spread between runs alone would make it."""
    rng = np.random.default_rng(4)

    def runs(change: float = 1.0) -> list[np.ndarray]:
        return [np.sort(np.exp(rng.normal(3.0, 0.3, 130))) * change for _ in range(5)]

    effect = float(np.median([noise.measure(runs()).minimum_effect for _ in range(60)]))
    shown = [compare_latency(runs(), runs(1.0 + effect), resamples=500).interval[0] > 1.0 for _ in range(150)]
    assert 0.65 < np.mean(shown) < 0.92


def test_the_summary_has_vllms_names_and_counts_from_the_schedule():
    records = [
        RequestRecord("a", 0.0, 0.01, 0.1, 0.5, 10, 5, (0.1, 0.3, 0.5)),
        RequestRecord("b", 1.0, 1.0, 1.3, 2.0, 20, 8, (1.3, 2.0)),
        RequestRecord("c", 1.5, 1.5, None, None, 5, 0, error="refused"),
    ]
    got = summarize(records, goodput={"ttft": 200.0, "tpot": 100.0})
    assert got["completed"] == 2
    assert got["failed"] == 1
    assert got["duration"] == 2.0
    assert got["request_throughput"] == 1.0
    assert got["output_throughput"] == 6.5
    assert got["total_token_throughput"] == 21.5
    assert got["request_goodput"] == 0.5
    assert got["mean_ttft_ms"] == pytest.approx(200.0)
    assert got["median_tpot_ms"] == pytest.approx(100.0)
    assert got["p99_e2el_ms"] == pytest.approx(995.0)
    assert got["mean_itl_ms"] == pytest.approx((200 + 200 + 700) / 3)
    assert got["errors"] == ["", "", "refused"]
    assert got["input_lens"] == [10, 20, 5]
    with pytest.raises(UsageError, match="unknown goodput metric 'itl'"):
        summarize(records, goodput={"itl": 1.0})


def test_the_self_test_passes_on_the_gate_as_it_is():
    cases = self_test(RUNS, MEMORY)
    assert [c for c in cases if not c.passed] == []
    assert any("+20%" in c.name for c in cases)
    assert {c.name for c in cases} >= {"peak_bytes: +12%", "peak_bytes: -12%", "weights_bytes: -12%"}


def reversed_compare(base, cand, **kwargs):
    return compare_runs(cand, base, **kwargs)


def one_sided_memory(base, cand, limit):
    return compare_memory(base, {k: max(v, base[k]) for k, v in cand.items()}, limit)


def test_the_self_test_finds_a_reversed_metric_and_a_one_sided_memory_gate():
    broken = {c.name for c in self_test(RUNS, MEMORY, compare=reversed_compare) if not c.passed}
    assert "tpot_p95_ms: 2.5 times slower" in broken
    blind = {c.name for c in self_test(RUNS, MEMORY, compare_mem=one_sided_memory) if not c.passed}
    assert blind == {"weights_bytes: -12%", "peak_bytes: -12%"}


def test_the_self_test_finds_a_direction_that_was_turned_round(monkeypatch):
    turned = replace(metrics.METRICS["output_throughput"], direction="lower")
    monkeypatch.setitem(metrics.METRICS, "output_throughput", turned)
    broken = {c.name for c in self_test(RUNS, MEMORY) if not c.passed}
    assert broken == {
        "output_throughput: better than its limit",
        "output_throughput: worse than its limit",
    }
