"""compare_latency: the rule on arrays, its invalid cases and its arithmetic."""

import numpy as np
import pytest

from delivery.gate import compare_latency
from delivery.gate.bootstrap import RatioDraws, ratio_draws
from delivery.gate.latency import LIMIT, Limits, judge
from delivery.gate.looks import ERROR, LOOKS, ONLY, looks
from delivery.gate.report import Verdict


def runs(change=1.0, *, count=5, size=130, sigma=0.2, noise=0.0, seed=0, scale=20.0):
    rng = np.random.default_rng([seed, 11])
    return [np.exp(rng.normal(0, sigma, size) + rng.normal(0, noise)) * scale * change for _ in range(count)]


def test_equal_samples_pass_with_a_ratio_of_exactly_one():
    verdict = compare_latency(runs(), runs())
    assert verdict.status == "pass"
    assert verdict.ratio == 1.0
    assert verdict.interval == (1.0, 1.0)


@pytest.mark.parametrize("paired", [True, False])
def test_twenty_percent_fails_and_ten_percent_passes(paired):
    assert compare_latency(runs(), runs(1.20), paired=paired).status == "fail"
    assert compare_latency(runs(), runs(1.03), paired=paired).status == "pass"


def test_a_ratio_of_exactly_the_limit_passes():
    assert compare_latency(runs(), runs(1.15)).status == "pass"


def test_an_improvement_passes():
    verdict = compare_latency(runs(), runs(0.4))
    assert verdict.status == "pass"
    assert verdict.ratio == pytest.approx(0.4)


def test_the_ratio_is_the_geometric_mean_over_runs_of_the_percentile_ratio():
    base, cand = runs(noise=0.1, seed=1), runs(1.1, noise=0.1, seed=2)
    each = [np.percentile(c, 90) / np.percentile(b, 90) for b, c in zip(base, cand, strict=True)]
    verdict = compare_latency(base, cand, percentile=90)
    assert verdict.ratio == pytest.approx(np.exp(np.mean(np.log(each))))


def test_a_difference_under_the_floor_does_not_fail():
    slow = compare_latency(runs(scale=1.0), runs(1.3, scale=1.0), floor_ms=0.5)
    assert slow.status == "pass"
    assert "floor" in slow.reason
    assert compare_latency(runs(scale=1.0), runs(1.3, scale=1.0), floor_ms=0.1).status == "fail"


def test_a_wide_interval_is_inconclusive_and_never_a_pass():
    verdict = compare_latency(
        runs(sigma=1.0, noise=0.3, seed=3), runs(1.1, sigma=1.0, noise=0.3, seed=4), paired=False
    )
    assert verdict.status == "inconclusive"
    assert not verdict.undecided
    assert verdict.half_width > 0.10


@pytest.mark.parametrize(("half_width", "status"), [(0.099, "pass"), (0.101, "inconclusive")])
def test_an_interval_over_the_limit_decides_only_up_to_ten_percent(half_width, status):
    spread = np.log1p(half_width) / 0.9  # of even draws, of which 90 % are the interval
    draws = RatioDraws(np.log(1.10), np.log(1.10) + np.linspace(-spread, spread, 2001), 20.0, 22.0)
    verdict = judge(draws, Limits(), ONLY, ONLY.error, runs=5)
    assert verdict.half_width == pytest.approx(half_width, rel=1e-3)
    assert verdict.interval[1] > LIMIT
    assert verdict.status == status


def test_sharing_prompts_cancels_what_is_common():
    rng = np.random.default_rng(5)
    shared = [np.exp(rng.normal(0, 1.0, 130)) * 50 for _ in range(5)]
    measured = [s * np.exp(rng.normal(0, 0.01, 130)) for s in shared]
    paired = compare_latency(shared, measured)
    apart = compare_latency(shared, measured, paired=False)
    assert paired.half_width < 0.03 < apart.half_width


def test_sorted_samples_are_not_matched_by_rank():
    base, cand = runs(seed=1), runs(seed=2)
    by_rank = compare_latency([np.sort(r) for r in base], [np.sort(r) for r in cand])
    assert by_rank.half_width == pytest.approx(compare_latency(base, cand).half_width, rel=0.3)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(0.0, "not finite and positive"), (-3.0, "not finite"), (np.nan, "not finite"), (np.inf, "not finite")],
)
@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_a_sample_that_is_not_finite_and_positive_is_invalid(bad, reason, side):
    spoiled = runs()
    spoiled[2][7] = bad
    pair = (spoiled, runs()) if side == "baseline" else (runs(), spoiled)
    verdict = compare_latency(*pair)
    assert verdict.status == "invalid"
    assert side in verdict.reason
    assert reason in verdict.reason


def test_too_few_requests_runs_or_pairs_are_invalid():
    assert "129 requests, 130" in compare_latency(runs(size=129), runs()).reason
    assert "4 runs, 5" in compare_latency(runs(), runs(count=4)).reason
    assert compare_latency(runs(count=6), runs(count=5)).status == "invalid"
    assert compare_latency(runs(count=6), runs(count=5), paired=False).status == "pass"
    assert compare_latency([], []).status == "invalid"


@pytest.mark.parametrize("limit", [1.0, 0.85, float("nan")])
def test_a_limit_that_is_no_slow_down_is_refused(limit):
    with pytest.raises(ValueError, match="above 1"):
        compare_latency(runs(), runs(), limit=limit)


def test_a_percentile_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="between 0 and 100"):
        compare_latency(runs(), runs(), percentile=100)


def test_the_looks_spend_the_whole_error_and_no_more():
    plan = looks()
    assert [look.pairs for look in plan] == list(LOOKS)
    assert sum(look.error for look in plan) == pytest.approx(ERROR)
    assert [look.last for look in plan] == [False, False, True]
    with pytest.raises(ValueError, match="increases"):
        looks((5, 5))


def test_an_undecided_look_asks_for_more_pairs_and_the_last_one_does_not():
    first, _, last = looks()
    base, cand = runs(sigma=0.5, noise=0.08, seed=8), runs(1.1, sigma=0.5, noise=0.08, seed=9)
    early = compare_latency(base, cand, look=first)
    assert early.status == "inconclusive"
    assert early.undecided
    more = compare_latency(base, cand, look=last)
    assert not more.undecided


def test_the_seed_decides_the_bootstrap():
    one, again, other = (compare_latency(runs(seed=1), runs(seed=2), seed=s) for s in (0, 0, 1))
    assert one == again
    assert one.interval != other.interval


@pytest.mark.parametrize("sizes", [(130, 130, 130, 130, 130), (130, 150, 130, 200, 140)])
def test_order_statistics_give_what_resampling_gives(sizes):
    """The shortcut over Beta draws has the distribution of percentiles of real resamples."""
    rng = np.random.default_rng(0)
    base = [np.exp(rng.normal(0, 0.5, n)) for n in sizes]
    cand = [np.exp(rng.normal(0, 0.5, n + 1)) for n in sizes]
    fast = ratio_draws(base, cand, percentile=95, paired=True, resamples=4000).draws
    slow = []
    for _ in range(1200):
        picks = rng.integers(0, 5, 5)
        slow.append(
            np.mean(
                [
                    np.log(np.percentile(rng.choice(cand[i], cand[i].size), 95))
                    - np.log(np.percentile(rng.choice(base[i], base[i].size), 95))
                    for i in picks
                ]
            )
        )
    for q in (0.05, 0.5, 0.95):
        assert np.quantile(fast, q) == pytest.approx(np.quantile(slow, q), abs=0.025)


def test_false_alarms_and_detections_at_the_default_budget():
    """A small cut of benchmarks/gate_power.py: 5 % run noise, 5 runs of 200 requests."""

    def failures(change):
        found = 0
        for seed in range(60):
            rng = np.random.default_rng([seed, 3])
            base, cand = (
                [np.sort(np.exp(rng.normal(0, 0.3, 200) + rng.normal(0, 0.05))) * c * 100 for _ in range(5)]
                for c in (1.0, change)
            )
            found += compare_latency(base, cand, resamples=1000).status is Verdict.FAIL
        return found

    assert failures(1.0) <= 1
    assert failures(1.25) >= 54
