"""Memory of a process on a GPU against the plan; the figures are those of a small model on an H200."""

import pytest

from delivery.report.smoke import numbers

LOADED = 1_956_642_816
"""What the process held, of which the allocator had 1,136 MiB."""
MEMORY = {
    "weights_bytes": 127_118_976.0,
    "kv_bytes": 754_974_720.0,
    "overhead_bytes": 33_259_520.0,
    "planned_peak_bytes": 364_904_448.0,
    "runtime_bytes": LOADED - 1136.0 * 2**20,
}


def status(kind, memory):
    measured = {
        "memory": memory,
        "load_s": 1.0,
        "open_turns": 0,
        "reference": {"tokens": 0},
        "agreement": None,
        "device": {"kind": kind},
    }
    return {m.name: m.status for m in numbers(measured, {}, memory_limit=0.1)}["process_bytes"]


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.0, "pass"), (1.08, "pass"), (1.2, "fail"), (0.8, "fail")]
)
def test_a_gpu_process_is_held_against_plan_and_driver(factor, expected):
    assert status("cuda", {**MEMORY, "process_bytes": LOADED * factor}) == expected


def test_a_plan_without_the_drivers_part_would_refuse_a_small_model():
    without = {name: size for name, size in MEMORY.items() if name != "runtime_bytes"}
    assert status("cuda", {**without, "process_bytes": float(LOADED)}) == "fail"


def test_on_a_processor_it_is_only_shown():
    assert status("cpu", {**MEMORY, "process_bytes": 9.0 * LOADED}) == "shown"
