"""compare_runs: validity before verdict, Holm, matching by request."""

from dataclasses import replace

import numpy as np
import pytest

from delivery.errors import UsageError
from delivery.gate import RequestRecord, compare_runs
from delivery.gate.family import holm
from delivery.gate.looks import looks


def run(seed=0, *, size=130, ttft=0.3, tpot=0.05, tokens=8, noise=0.02):
    rng = np.random.default_rng([seed, 7])
    out = []
    for i in range(size):
        start = i * 0.1
        first = start + ttft * np.exp(rng.normal(0, noise))
        last = first + tpot * (tokens - 1) * np.exp(rng.normal(0, noise))
        out.append(RequestRecord(f"r{i}", start, start + 0.001, first, last, 16, tokens))
    return out


def many(first_seed=0, **kwargs):
    return [run(first_seed + i, **kwargs) for i in range(5)]


def spoil(runs, number, **changes):
    runs[2][number] = replace(runs[2][number], **changes)
    return runs


def test_one_slower_metric_fails_the_family_and_is_named():
    verdict = compare_runs(many(), many(50, tpot=0.065))
    assert verdict.status == "fail"
    assert verdict.metrics["tpot_p95_ms"].status == "fail"
    assert verdict.metrics["ttft_p95_ms"].status == "pass"
    assert verdict.reason.startswith("tpot_p95_ms: ")


def test_an_equal_family_passes_and_a_faster_one_too():
    assert compare_runs(many(), many(50)).status == "pass"
    assert compare_runs(many(), many(50, ttft=0.1, tpot=0.01)).status == "pass"


def test_one_stored_run_of_other_lengths_is_invalid():
    uneven = [*many()[:-1], spoil(many(), 5, output_tokens=7)[2]]
    verdict = compare_runs(uneven, many(50), paired=False)
    assert verdict.status == "invalid"
    assert "baseline run 5: output lengths differ" in verdict.reason


def test_stored_runs_may_differ_in_number():
    assert compare_runs(many() + many(90), many(50), paired=False).status == "pass"
    assert compare_runs(many() + many(90), many(50)).status == "invalid"


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        (spoil(many(), 5, error="connection reset", last_token_s=None), "1 of 130 requests failed"),
        (spoil(many(), 5, output_tokens=7), "output lengths differ"),
        (spoil(many(), 5, first_token_s=0.0), "the times of r5 are not finite, or not in order"),
        (spoil(many(), 5, last_token_s=float("nan")), "the times of r5 are not finite, or not in order"),
        (spoil(many(), 5, sent_s=float("-inf")), "the times of r5 are not finite, or not in order"),
        (spoil(many(), 5, last_token_s=-1.0), "a clock jumped"),
        ([r[:120] for r in many()], "120 requests, 130 are needed"),
        (many()[:4], "4 candidate runs"),
        ([[replace(r, sent_s=r.sent_s + 0.02) for r in x] for x in many()], "sent 21.0 ms late"),
        (
            [[*x[:-1], replace(x[-1], sent_s=x[-1].scheduled_s + 1.0)] for x in many()],
            "of the requested rate",
        ),
        ([], "the candidate has no runs"),
    ],
)
def test_what_is_wrong_with_the_measurement_is_invalid_and_never_a_pass(spoiled, reason):
    verdict = compare_runs(many(), spoiled)
    assert verdict.status == "invalid"
    assert reason in verdict.reason
    assert verdict.metrics == {}
    swapped = compare_runs(spoiled, many())
    assert swapped.status == "invalid"


def test_a_candidate_that_cannot_keep_up_fails_and_is_not_invalid():
    late = [[replace(r, last_token_s=r.last_token_s + 0.05 * i) for i, r in enumerate(x)] for x in many()]
    assert compare_runs(many(), late).status == "fail"


def test_an_unknown_metric_gets_a_suggestion():
    with pytest.raises(UsageError, match="did you mean 'tpot_p95_ms'"):
        compare_runs(many(), many(), metrics=["tpott_p95_ms"])


def test_the_gap_between_chunks_is_not_gated():
    with pytest.raises(UsageError, match="flushes"):
        compare_runs(many(), many(), metrics=["itl_p95_ms"])


def test_looks_go_on_while_undecided():
    noisy = [run(i, ttft=0.3 * np.exp(np.random.default_rng(i).normal(0, 0.12))) for i in range(5)]
    verdict = compare_runs(many(), noisy, metrics=["ttft_p95_ms"], look=looks()[0])
    assert verdict.undecided
    assert not compare_runs(many(), noisy, metrics=["ttft_p95_ms"], look=looks()[-1]).undecided


def test_holm_steps_down_and_stops_at_the_first_that_is_kept():
    allowed = holm({"a": 0.010, "b": 0.020, "c": 0.2}, 0.05)
    assert allowed == {"a": pytest.approx(0.05 / 3), "b": pytest.approx(0.025), "c": 0.0}
    assert holm({"a": 0.03, "b": 0.001, "c": 0.04}, 0.05) == {
        "b": pytest.approx(0.05 / 3),
        "a": 0.0,
        "c": 0.0,
    }


@pytest.mark.parametrize("lost", ["first_token_s", "last_token_s"])
def test_a_request_that_neither_failed_nor_was_answered_is_invalid(lost):
    runs = [run(i) for i in range(5)]
    holed = [list(r) for r in runs]
    holed[2][7] = replace(holed[2][7], **{lost: None})
    verdict = compare_runs(runs, holed)
    assert verdict.status == "invalid"
    assert "candidate run 3: 1 of 130 requests have neither answer nor error (first, r7)" in verdict.reason
