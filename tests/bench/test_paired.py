"""Paired measurement: A B B A, more pairs while undecided, an early end, disturbed runs once more."""

from dataclasses import replace

import numpy as np
import pytest

from delivery.bench.disturbance import Disturbance
from delivery.bench.paired import measure_alone, measure_pairs
from delivery.bench.plan import probe_plan
from delivery.bench.workload import Arrival, parse_workload
from delivery.errors import UsageError
from delivery.gate.record import RequestRecord

WORKLOAD = parse_workload(
    {
        "requests": 130,
        "shape": {"prompt_tokens": 4, "output_tokens": 8},
        "arrival": {"concurrency": 8},
    }
)


class Task:
    def __init__(self):
        self.notes, self.done = [], 0

    def advance(self, amount=1):
        self.done += amount

    def note(self, text):
        self.notes.append(text)


class Machine:
    """An engine whose runs take turns at being as slow as `slower` says.

    It answers `capacity` requests a second once `full` are in flight; `disturbed` tells of each load, in
    order, whether the machine swapped meanwhile, or which share of it others used.
    """

    def __init__(self, name, log, *, slower=(1.0,), disturbed=(), capacity=40.0, full=64, prefill=None):
        self.name, self.log, self.slower = name, log, slower
        self.disturbed, self.capacity, self.full = list(disturbed), capacity, full
        self.prefill = prefill
        self.runtime, self.load_s, self.settings = "deliver", 1.0, {}

    def warm_up(self, workload):
        self.log.append((self.name, "warm"))

    def probe(self, workload, in_flight):
        self.log.append((self.name, f"probe {in_flight}"))
        took = max(in_flight, self.full) / self.capacity
        out = []
        for i, asked in enumerate(probe_plan(workload, in_flight).requests):
            at = (i // in_flight) * took
            out.append(RequestRecord(asked.id, at, at, at + took / 2, at + took, 4, asked.output_tokens))
        return out, self._disturbance()

    def run(self, workload, number):
        self.log.append((self.name, number))
        own = np.random.default_rng([number, len(self.name), 5])
        factor = self.slower[number % len(self.slower)]
        out = []
        for i in range(workload.requests):
            first = 0.2 * (self.prefill or factor) * np.exp(own.normal(0, 0.02))
            last = first + 7 * 0.05 * factor * np.exp(own.normal(0, 0.02))
            out.append(RequestRecord(f"r{i}", i * 0.1, i * 0.1, i * 0.1 + first, i * 0.1 + last, 4, 8))
        return out, self._disturbance()

    def _disturbance(self):
        loud = self.disturbed.pop(0) if self.disturbed else False
        if isinstance(loud, float):
            return Disturbance(foreign_cpu_ratio=loud)
        return Disturbance(swapped_pages=9 if loud else 0)

    def memory(self):
        return {"resident_bytes": 1e9}


def pairs(task=None, **candidate):
    log = []
    made = measure_pairs(
        Machine("a", log),
        Machine("bb", log, **candidate),
        WORKLOAD,
        1.15,
        task or Task(),
    )
    return made, log


def test_pairs_are_interleaved_and_stop_when_all_is_clear():
    task = Task()
    made, log = pairs(task)
    assert log[:2] == [("a", "warm"), ("bb", "warm")]
    assert [name for name, _ in log[2:]] == ["a", "bb", "bb", "a", "a", "bb", "bb", "a", "a", "bb"]
    assert [number for _, number in log[2:]] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len(made.candidate.runs) == len(made.baseline.runs) == 5
    assert task.notes == ["5 pairs: pass"]
    assert task.done == 10 * 130


def test_a_clear_loss_stops_early_too():
    made, _ = pairs(slower=(1.4,))
    assert len(made.candidate.runs) == 5


def test_pairs_go_on_while_it_is_undecided():
    task = Task()
    made, log = pairs(task, slower=(0.95, 1.25))
    assert len(made.candidate.runs) in (8, 12)
    assert task.notes[0] == "5 pairs: inconclusive"
    names = [name for name, _ in log[2:]]
    assert [names[i : i + 2] for i in range(0, len(names), 2)] == [
        ["a", "bb"] if n % 2 == 0 else ["bb", "a"] for n in range(len(names) // 2)
    ]


@pytest.mark.parametrize(("disturbed", "attempts", "kept"), [([True], 6, 0), ([True] * 9, 7, 9)])
def test_a_disturbed_run_is_measured_again_a_few_times(disturbed, attempts, kept):
    log, task = [], Task()
    made = measure_alone(Machine("a", log, disturbed=disturbed), WORKLOAD, 5, task)
    assert len(log) == attempts + 1
    assert sum(d.swapped_pages > 0 for d in made.candidate.disturbances) == min(kept, 5)
    assert "run 1 again: the machine swapped 9 pages meanwhile" in task.notes


def test_foreign_load_within_the_limit_that_was_given_is_no_reason_to_measure_again():
    def attempts(foreign_limit):
        log = []
        machine = Machine("a", log, disturbed=[0.7])
        measure_alone(machine, WORKLOAD, 5, Task(), foreign_limit)
        other = Machine("bb", log, disturbed=[0.7])
        measure_pairs(Machine("c", log), other, WORKLOAD, 1.15, Task(), foreign_limit=foreign_limit)
        return [sum(isinstance(number, int) for who, number in log if who == name) for name in ("a", "bb")]

    assert attempts(0.8) == [5, 5]
    assert attempts(0.6) == [6, 6]


def test_pairs_are_looked_at_by_the_metrics_that_will_be_judged():
    """Here the times to the first token are clear at once, and those of the others are not."""

    def looks(*metrics):
        task = Task()
        unsteady = Machine("bb", [], slower=(0.95, 1.25), prefill=1.0)
        measure_pairs(Machine("a", []), unsteady, WORKLOAD, 1.15, task, metrics)
        return task.notes

    assert looks("ttft_p95_ms") == ["5 pairs: pass"]
    assert looks("ttft_p95_ms", "tpot_p95_ms")[0] == "5 pairs: inconclusive"
    with pytest.raises(UsageError, match="cannot be gated"):
        measure_pairs(Machine("a", []), Machine("bb", []), WORKLOAD, 1.15, Task(), ["itl_p95_ms"])


def open_loop(rate, requests=130):
    return replace(WORKLOAD, requests=requests, arrival=Arrival("poisson", rate=rate))


def test_an_open_loop_looks_first_how_much_each_side_can_sustain():
    log, task = [], Task()
    made = measure_pairs(
        Machine("a", log, capacity=40.0), Machine("bb", log, capacity=30.0), open_loop(20.0), 1.15, task
    )
    assert log[:4] == [("a", "warm"), ("bb", "warm"), ("a", "probe 64"), ("bb", "probe 64")]
    assert made.baseline.capacity == pytest.approx(40.0)
    assert made.candidate.capacity == pytest.approx(30.0)
    assert len(made.candidate.runs) == 5
    assert "64 in flight: 40 requests/s" in task.notes


def test_more_and_more_are_in_flight_until_that_brings_no_more():
    log = []
    made = measure_alone(Machine("a", log, capacity=100.0, full=200), open_loop(1.0, 1100), 1, Task())
    assert [what for _, what in log if what not in ("warm", 0)] == [
        "probe 64",
        "probe 128",
        "probe 256",
        "probe 512",
    ]
    assert made.candidate.capacity == pytest.approx(100.0)


def test_an_open_loop_over_half_of_the_baselines_capacity_is_not_even_measured():
    log = []
    made = measure_pairs(Machine("a", log, capacity=40.0), Machine("bb", log), open_loop(20.1), 1.15, Task())
    assert [entry for entry in log if entry[1] != "warm"] == [("a", "probe 64")]
    assert made.candidate.runs == made.baseline.runs == ()
    assert made.baseline.capacity == pytest.approx(40.0)


def test_a_probe_that_stays_disturbed_says_nothing():
    made = measure_alone(Machine("a", [], disturbed=[True] * 3), open_loop(1.0), 5, Task())
    assert made.candidate.capacity is None
    assert measure_alone(Machine("a", [], disturbed=[True] * 2), open_loop(1.0), 5, Task()).candidate.capacity


def test_a_closed_loop_needs_no_probe():
    log = []
    assert measure_alone(Machine("a", log), WORKLOAD, 5, Task()).candidate.capacity is None
    assert len(log) == 6
