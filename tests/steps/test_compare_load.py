"""The load of a comparison: at most half of the baseline's capacity, and who cannot keep up fails.

A simulated engine with a clock of its own stands for the real one: `slots` requests advance by a token
every 10 ms, the others wait. All behind it is the code that measures and judges real engines.
"""

import json
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from test_compare_judge import MEMORY, commit, judged, metric, said

from delivery.bench import EngineTarget
from delivery.bench.disturbance import Disturbance
from delivery.bench.load import run_load, run_probe, warm_up
from delivery.bench.measured import Side
from delivery.bench.paired import measure_alone, measure_pairs
from delivery.bench.plan import offered_rate
from delivery.bench.workload import Arrival, parse_workload
from delivery.engine.outputs import RequestOutput
from delivery.errors import Undecided
from delivery.gate import Verdict
from delivery.gate import baseline as baselines
from delivery.report.headline import headline
from delivery.steps.compare import Compare

__all__ = ["judged"]
STEP_S, TOKENS = 0.010, 10


@pytest.fixture(autouse=True)
def simulated_clock(monkeypatch):
    """A clock that only the engine moves sees no garbage collection; collecting first takes seconds here."""
    monkeypatch.setattr("delivery.bench.load._no_garbage_collection", nullcontext)


def load(rate):
    return parse_workload(
        {
            "requests": 130,
            "shape": {"prompt_tokens": 4, "output_tokens": TOKENS},
            "arrival": {"kind": "poisson", "rate": rate},
        }
    )


class Engine:
    """Can sustain slots / (TOKENS · STEP_S) requests a second."""

    def __init__(self, slots):
        self.slots, self.now, self.left = slots, 0.0, {}

    def add_request(self, request):
        self.left[request.request_id] = request.sampling.max_tokens

    def step(self):
        self.now += STEP_S
        out = []
        for name in list(self.left)[: self.slots]:
            self.left[name] -= 1
            out.append(RequestOutput(name, [7], "x", None if self.left[name] else "length"))
            if not self.left[name]:
                del self.left[name]
        return out

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds + 1e-9  # a sum may fall short of what was due by its last digit


@dataclass
class Simulated:
    """A session of one simulated engine."""

    slots: int
    runtime: str = "deliver"
    load_s: float = 2.5
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        engine = Engine(self.slots)
        self.target = EngineTarget(engine, 1000, clock=engine.clock, sleep=engine.sleep)

    def warm_up(self, workload):
        warm_up(self.target, workload)

    def probe(self, workload, in_flight):
        return run_probe(self.target, workload, in_flight), Disturbance()

    def run(self, workload, number):
        return run_load(self.target, workload, run=number, warm=False), Disturbance()

    def memory(self):
        return dict(MEMORY)


class Task:
    def advance(self, amount=1): ...

    def note(self, text): ...


def beside(base, cand, workload):
    made = measure_pairs(Simulated(base), Simulated(cand), workload, 1.15, Task())
    return made.candidate, made.baseline


def alone(slots, workload):
    return measure_alone(Simulated(slots), workload, 5, Task()).candidate


@pytest.mark.parametrize("slots", [1, 2, 10, 40])
def test_the_probe_finds_what_an_engine_can_sustain(slots):
    assert alone(slots, load(0.5)).capacity == pytest.approx(slots / (TOKENS * STEP_S), rel=0.05)


def test_a_load_of_half_of_the_baselines_capacity_is_judged(judged):
    ours, theirs = beside(4, 4, load(18.0))
    report = judged(ours, theirs, rate=18.0)
    assert report.verdict is Verdict.PASS
    assert metric(report, "request_capacity").limit == 18.0
    assert metric(report, "request_capacity").baseline == pytest.approx(40.0, rel=0.05)
    assert "the load was 18 requests/s, 45% of what the baseline can sustain" in said(report)


def test_a_load_over_half_of_it_is_invalid_and_says_what_to_do(judged):
    ours, theirs = beside(4, 4, load(25.0))
    assert ours.runs == theirs.runs == ()
    report = judged(ours, theirs, rate=25.0)
    assert report.verdict is Verdict.INVALID
    assert "the workload sends 25 requests/s to a baseline that can sustain 40" in said(report)
    assert "send at most 20 (compare --rate" in said(report)
    assert not report.metrics  # nothing was measured, so nothing is shown


def test_a_candidate_that_cannot_keep_up_fails(judged):
    """40 requests/s were sustained, 18 are asked, 10 are what the candidate can do."""
    ours, theirs = beside(4, 1, load(18.0))
    report = judged(ours, theirs, rate=18.0)
    assert report.verdict is Verdict.FAIL
    assert metric(report, "ttft_p95_ms").status == "fail"
    assert metric(report, "request_capacity").status == "fail"
    assert "the candidate cannot keep up with 18 requests/s: it can sustain 10" in said(report)
    assert "--rate 18.0" in headline(report).command


def test_it_fails_even_by_a_metric_that_does_not_see_the_queue(judged):
    """Once a request has its slot its tokens come as fast as ever: only the waiting grows without end."""
    ours, theirs = beside(4, 1, load(18.0))
    report = judged(ours, theirs, rate=18.0, gate={"metrics": ["tpot_p95_ms"]})
    assert metric(report, "tpot_p95_ms").status == "pass"
    assert report.verdict is Verdict.FAIL


def test_with_stored_runs_the_capacity_is_that_of_the_baselines_record(judged):
    commit(judged, alone(4, load(18.0)), rate=18.0)
    assert judged(alone(4, load(18.0)), rate=18.0).verdict is Verdict.PASS
    slow = judged(alone(1, load(18.0)), rate=18.0, engine="e2")
    assert slow.verdict is Verdict.FAIL
    assert metric(slow, "request_capacity").baseline == pytest.approx(40.0, rel=0.05)


def test_a_stored_baseline_that_is_too_slow_for_the_load_is_invalid(judged):
    commit(judged, alone(3, load(18.0)), rate=18.0)
    report = judged(alone(40, load(18.0)), rate=18.0)
    assert report.verdict is Verdict.INVALID
    assert "a baseline that can sustain 30" in said(report)


def test_a_record_without_a_capacity_says_what_to_do(judged):
    commit(judged, replace(alone(4, load(18.0)), capacity=None), rate=18.0)
    report = judged(alone(4, load(18.0)), rate=18.0)
    assert report.verdict is Verdict.INVALID
    assert "deliver baseline update" in said(report)


def test_no_baseline_is_made_of_a_load_that_its_own_engine_cannot_bear(judged):
    gate = {"missing_baseline": "bootstrap"}
    report = judged(alone(3, load(18.0)), rate=18.0, gate=gate)
    assert report.verdict is Verdict.INVALID
    assert not (judged.root / "local").exists()
    assert judged(alone(4, load(18.0)), rate=18.0, gate=gate, engine="e2").verdict is Verdict.BOOTSTRAPPED


def test_a_candidate_whose_capacity_was_not_seen_is_invalid(judged):
    commit(judged, alone(4, load(18.0)), rate=18.0)
    report = judged(replace(alone(4, load(18.0)), capacity=None), rate=18.0)
    assert report.verdict is Verdict.INVALID
    assert "the probe was disturbed or failed" in said(report)


def test_a_server_that_turns_requests_away_fails_with_a_metric_that_can_be_waived(judged):
    ours, theirs = beside(4, 4, load(18.0))
    lost = [
        replace(r, error="status 429: queue is full", first_token_s=None, last_token_s=None)
        for r in ours.runs[2]
    ]
    busy = replace(ours, runs=(*ours.runs[:2], tuple(lost), *ours.runs[3:]))
    report = judged(busy, theirs, rate=18.0)
    assert report.verdict is Verdict.FAIL
    assert metric(report, "failed_requests_ratio").status == "fail"
    assert metric(report, "failed_requests_ratio").value == pytest.approx(0.2)
    assert "it cannot keep up: run 3 did not answer 130 of 130 requests" in said(report)


def test_a_closed_loop_has_no_rate_and_one_can_be_given():
    assert offered_rate(Compare()._workload()) is None
    assert offered_rate(Compare(rate=3.0)._workload()) == 3.0
    assert Compare(rate=3.0).external()["workload"] != Compare().external()["workload"]
    assert Side((), (), None, "deliver", None).capacity is None


def test_a_first_measurement_in_which_requests_were_turned_away_becomes_no_baseline(judged):
    ours = measure_alone(Simulated(8), parse_closed(), 5, Task()).candidate
    lost = replace(ours.runs[2][7], error="status 503: busy", first_token_s=None, last_token_s=None)
    run = (*ours.runs[2][:7], lost, *ours.runs[2][8:])
    busy = replace(ours, runs=(*ours.runs[:2], run, *ours.runs[3:]))
    report = judged(busy, gate={"missing_baseline": "bootstrap"})
    assert report.verdict is Verdict.INVALID
    assert "it cannot keep up: run 3 did not answer 1 of 130 requests" in said(report)
    assert not (judged.root / "local").exists()


def parse_closed():
    return replace(load(1.0), arrival=Arrival("closed", concurrency=4))


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        ({"disturbances": (Disturbance(swapped_pages=9),) * 5}, "swapped 9 pages"),
        ({"capacity": 30.0}, "to a baseline that can sustain 30"),
    ],
)
def test_update_makes_no_baseline_of_a_measurement_that_says_nothing(judged, spoiled, reason):
    """Otherwise every later one would be invalid, or held against what a disturbed machine did."""
    report = judged(
        replace(alone(4, load(18.0)), **spoiled), rate=18.0, gate={"missing_baseline": "bootstrap"}
    )
    assert report.verdict is Verdict.INVALID
    artifact = judged.artifact(report)
    with pytest.raises(Undecided, match="cannot become a baseline") as caught:
        Compare(rate=18.0).as_baseline("demo", artifact, "please")
    assert reason in caught.value.render()


def test_update_makes_a_baseline_with_its_capacity(judged):
    report = judged(alone(4, load(18.0)), rate=18.0, gate={"missing_baseline": "bootstrap"})
    place, taken = Compare(rate=18.0).as_baseline("demo", judged.artifact(report), "first")
    assert taken.capacity == pytest.approx(40.0, rel=0.05)
    path = place.path(judged.root / "committed")
    made = baselines.new(
        "demo", place.device, place.workload, place.workload_digest, taken, bootstrapped=False
    )
    baselines.write(path, made)
    assert baselines.read(path).current.capacity == taken.capacity
    old = json.loads(path.read_text())
    del old["current"]["capacity"]
    path.write_text(json.dumps(old))
    assert baselines.read(path).current.capacity is None  # as earlier versions wrote it
