"""What a side can sustain, what an open loop may ask of it, and requests that were turned away."""

from dataclasses import replace

import pytest

from delivery.gate import RequestRecord, Verdict, compare_runs
from delivery.gate.capacity import rounded_down, sustained_rate, why_too_fast
from delivery.gate.validity import ValidityLimits, why_invalid_run, why_not_kept_up


def record(number, sent, last, error=None):
    times = tuple(sent + (last - sent) * (i + 1) / 8 for i in range(8))
    return RequestRecord(f"r{number}", sent, sent, times[0], last, 4, 8, token_times_s=times, error=error)


def waves(in_flight, took, count, start=0.0):
    return [
        record(i, start + (i // in_flight) * took, start + (i // in_flight + 1) * took) for i in range(count)
    ]


@pytest.mark.parametrize("start", [0.0, 7.0])
def test_waves_of_equal_requests_give_the_rate_exactly(start):
    """8 in flight, half a second each: 16 a second, whether two waves were seen or five."""
    for count in (16, 40):
        assert sustained_rate(waves(8, 0.5, count, start)) == pytest.approx(16.0)


def test_a_request_that_was_begun_counts_by_the_share_of_its_tokens():
    """One slot of 2 s beside one of 1 s: 1.5 requests a second, though one had only half of its tokens."""
    long = [record(0, 0.0, 2.0), record(1, 2.0, 4.0)]
    short = [record(2, 0.0, 1.0), record(3, 1.0, 2.0), record(4, 2.0, 3.0), record(5, 3.0, 4.0)]
    assert sustained_rate(long + short) == pytest.approx(1.5)


def test_a_request_that_waited_in_the_servers_queue_counts_nothing():
    """Two in flight, one slot of 1 s: one request a second."""
    slow = [
        replace(
            record(i, max(0.0, i - 1.0), i + 1.0), token_times_s=(i + 0.5, i + 1.0), first_token_s=i + 0.5
        )
        for i in range(6)
    ]
    assert sustained_rate(slow) == pytest.approx(1.0)


def test_what_was_sent_at_once_counts_until_the_last_answer():
    assert sustained_rate(waves(8, 0.5, 8)) == pytest.approx(16.0)


def test_what_failed_was_not_sustained():
    some = [replace(r, error="status 429: busy") if i % 2 else r for i, r in enumerate(waves(8, 0.5, 40))]
    assert sustained_rate(some) == pytest.approx(8.0)
    assert sustained_rate([replace(r, error="x") for r in some]) is None
    assert sustained_rate([]) is None


@pytest.mark.parametrize(
    ("rate", "capacity", "fair"), [(5.0, 10.0, True), (5.01, 10.0, False), (1, 0.0, False)]
)
def test_an_open_loop_asks_at_most_half(rate, capacity, fair):
    assert (why_too_fast(rate, capacity) == "") is fair


def test_the_reason_says_what_to_do():
    told = why_too_fast(8.0, 9.27)
    assert "sends 8 requests/s to a baseline that can sustain 9.27" in told
    assert "send at most 4.6 (compare --rate" in told
    assert "sends 100,000 requests/s to a baseline that can sustain 1,240" in why_too_fast(1e5, 1240.4)
    assert "deliver baseline update" in why_too_fast(8.0, None)


@pytest.mark.parametrize(
    ("rate", "text"),
    [(4.65, "4.6"), (0.0329, "0.032"), (123.9, "120"), (4.6, "4.6"), (0.29, "0.29"), (10, "10"), (0.0, "0")],
)
def test_a_rate_is_rounded_down(rate, text):
    assert rounded_down(rate) == text
    assert float(rounded_down(rate)) <= rate + 1e-12


def steady(size=130):
    return [RequestRecord(f"r{i}", i * 0.1, i * 0.1, i * 0.1 + 0.2, i * 0.1 + 0.5, 4, 8) for i in range(size)]


def turned_away(run, count, error):
    lost = [replace(r, error=error, first_token_s=None, last_token_s=None) for r in run[:count]]
    return lost + run[count:]


@pytest.mark.parametrize(
    "error", ["status 429: queue is full", "status 503: overloaded", "no whole answer within 600 s"]
)
@pytest.mark.parametrize("lost", [3, 130])
def test_a_candidate_that_turns_requests_away_fails_and_a_baseline_that_does_is_invalid(error, lost):
    good = [steady() for _ in range(5)]
    busy = [*good[:4], turned_away(steady(), lost, error)]
    verdict = compare_runs(good, busy)
    assert verdict.status is Verdict.FAIL
    assert not verdict.undecided
    assert f"it cannot keep up: run 5 did not answer {lost} of 130 requests" in verdict.reason
    assert compare_runs(busy, good).status is Verdict.INVALID


def test_any_other_error_stays_invalid_beside_refusals():
    good = [steady() for _ in range(5)]
    run = turned_away(steady(), 3, "status 429: queue is full")
    run[9] = replace(run[9], error="status 500: bug")
    verdict = compare_runs(good, [*good[:4], run])
    assert verdict.status is Verdict.INVALID
    assert "1 of 130 requests failed (first, r9: status 500: bug)" in verdict.reason
    assert why_invalid_run(run, ValidityLimits()).startswith("4 of 130 requests failed")
    assert why_not_kept_up(good) == ""


def test_refusals_do_not_make_up_for_too_few_requests():
    run = turned_away(steady(129), 3, "status 429")
    assert "129 requests, 130 are needed" in why_invalid_run(run, ValidityLimits(), judged=True)
