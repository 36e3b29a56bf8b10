"""Paired measurement: A B B A, more pairs while undecided, an early end, disturbed runs once more."""

import numpy as np
import pytest

from delivery.bench.disturbance import Disturbance
from delivery.bench.paired import measure_alone, measure_pairs
from delivery.bench.workload import parse_workload
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
    """An engine whose runs take turns at being as slow as `slower` says."""

    def __init__(self, name, log, *, slower=(1.0,), disturbed=()):
        self.name, self.log, self.slower = name, log, slower
        self.disturbed = list(disturbed)
        self.runtime, self.load_s, self.settings = "deliver", 1.0, {}

    def run(self, workload, number, *, warm):
        self.log.append((self.name, number, warm))
        own = np.random.default_rng([number, len(self.name), 5])
        factor = self.slower[number % len(self.slower)]
        out = []
        for i in range(workload.requests):
            first = 0.2 * factor * np.exp(own.normal(0, 0.02))
            last = first + 7 * 0.05 * factor * np.exp(own.normal(0, 0.02))
            out.append(RequestRecord(f"r{i}", i * 0.1, i * 0.1, i * 0.1 + first, i * 0.1 + last, 4, 8))
        loud = self.disturbed.pop(0) if self.disturbed else False
        return out, Disturbance(swapped_pages=9 if loud else 0)

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
    assert [name for name, _, _ in log] == ["a", "bb", "bb", "a", "a", "bb", "bb", "a", "a", "bb"]
    assert [number for _, number, _ in log] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [warm for _, _, warm in log] == [True, True] + [False] * 8
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
    names = [name for name, _, _ in log]
    assert [names[i : i + 2] for i in range(0, len(names), 2)] == [
        ["a", "bb"] if n % 2 == 0 else ["bb", "a"] for n in range(len(names) // 2)
    ]


@pytest.mark.parametrize(("disturbed", "attempts", "kept"), [([True], 6, 0), ([True] * 9, 7, 9)])
def test_a_disturbed_run_is_measured_again_a_few_times(disturbed, attempts, kept):
    log, task = [], Task()
    made = measure_alone(Machine("a", log, disturbed=disturbed), WORKLOAD, 5, task)
    assert len(log) == attempts
    assert sum(d.swapped_pages > 0 for d in made.candidate.disturbances) == min(kept, 5)
    assert "run 1 again: the machine swapped 9 pages meanwhile" in task.notes
