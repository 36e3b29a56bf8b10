"""What compare says before anything is computed: its workload, the engines' lengths, the memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delivery.bench.plan import check_lengths, engine_options, longest_request, plan
from delivery.bench.workload import parse_workload
from delivery.engine import build
from delivery.errors import DeliverError, UsageError
from delivery.steps.build import Build
from delivery.steps.compare import Compare
from delivery.steps.step import Ahead, Known


@pytest.fixture(scope="module")
def known(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Known]:
    """An engine of 128 tokens: made, and predicted."""
    folder = tmp_path_factory.mktemp("engine") / "engine"
    build(tiny_checkpoint, folder, device="cpu", max_model_len=128)
    source = [Ahead("convert", {}, tiny_checkpoint)]
    predicted = Ahead(
        "build", {"max_session_len": 128}, predict=lambda: Build().outline({"checkpoint": source})
    )
    return {
        "made": {"engine": [Ahead("build", {"max_session_len": 128}, folder)]},
        "predicted": {"engine": [predicted]},
        "open": {"engine": [Ahead("build", {}, predict=predicted._predict)]},
    }


def workload(folder: Path, **changes: object) -> str:
    path = folder / "w.json"
    shape = {"prompt_tokens": 100, "output_tokens": 29}
    path.write_text(json.dumps({"requests": 130, "shape": shape, "arrival": {"concurrency": 4}, **changes}))
    return str(path)


@pytest.mark.parametrize("when", ["made", "predicted"])
def test_requests_longer_than_the_engine_holds(when: str, known: dict[str, Known], tmp_path: Path) -> None:
    reason = r"100 prompt tokens and 29 output tokens; the engine was built for 128"
    with pytest.raises(UsageError, match=reason):
        Compare(workload=workload(tmp_path)).preflight(known[when])
    fits = workload(tmp_path, shape={"prompt_tokens": 100, "output_tokens": 28})
    Compare(workload=fits).preflight(known[when])
    Compare(workload=workload(tmp_path)).preflight({})  # nothing is known yet
    Compare(workload=workload(tmp_path), runtime="http://localhost:1").preflight(known[when])


def test_an_engine_of_open_length_is_held_against_its_model(known: dict[str, Known], tmp_path: Path) -> None:
    long = workload(tmp_path, shape={"prompt_tokens": 600, "output_tokens": 1})
    with pytest.raises(UsageError, match="the engine's model was made for 512"):
        Compare(workload=long).preflight(known["open"])
    beside = {"engine": known["open"]["engine"], "baseline_engine": known["made"]["engine"]}
    with pytest.raises(UsageError, match="the baseline's engine was built for 128"):
        Compare(workload=workload(tmp_path)).preflight(beside)


def test_more_tokens_than_both_sides_reserve(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="both sides reserve KV tokens: 64") as e:
        Compare(workload=workload(tmp_path), kv_tokens=64).preflight({})
    assert e.value.hint == "--kv-tokens 1536"
    Compare(workload=workload(tmp_path), kv_tokens=1536).preflight({})


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"workload": "dmeo"}, "unknown-workload"),
        ({"rate": float("inf")}, "bad-workload"),
        ({"results": ("none.json",)}, "results-unreadable"),
    ],
)
def test_what_cannot_be_measured_is_told_at_once(settings: dict[str, object], code: str) -> None:
    with pytest.raises(DeliverError) as e:
        Compare(**settings).preflight({})  # type: ignore[arg-type]
    assert e.value.code == code


def test_a_malformed_workload_and_too_few_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the shape has tokens in and out"):
        Compare(workload=workload(tmp_path, shape={"prompt_tokens": 3})).preflight({})
    (tmp_path / "w.json").write_text("{")
    with pytest.raises(UsageError, match="is not a workload"):
        Compare(workload=str(tmp_path / "w.json")).preflight({})
    with pytest.raises(UsageError, match="at least 5 runs"):
        Compare(runs=4).check()


def test_peak_of_one_engine_and_of_two(known: dict[str, Known]) -> None:
    made, predicted = (Compare().predict_peak(known[k]) for k in ("made", "predicted"))
    assert made is not None
    assert predicted is not None
    assert abs(made.host_bytes / predicted.host_bytes - 1) < 0.05
    assert made.gpu_bytes == 0
    both = Compare().predict_peak({**known["made"], "baseline_engine": known["made"]["engine"]})
    assert both is not None
    assert both.host_bytes == 2 * made.host_bytes
    assert Compare().predict_peak({}) is None
    assert Compare(runtime="http://localhost:1").predict_peak(known["made"]) is None


def test_the_longest_request_counts_what_is_common() -> None:
    shape = {"kind": "shared_prefix", "prompt_tokens": 3, "output_tokens": 4, "prefixes": 2}
    load = parse_workload({"requests": 6, "shape": {**shape, "prefix_tokens": 10}, "arrival": {}})
    assert longest_request(load) == (13, 4)
    assert max(r.prompt_tokens for r in plan(load).requests) == 13
    check_lengths(load, "it holds", 17)
    with pytest.raises(UsageError, match="13 prompt tokens and 4 output tokens; it holds 16"):
        check_lengths(load, "it holds", 16)
    assert engine_options(load)["cache_max_entry_count"] == 2


def test_a_negative_floor_of_memory_is_refused_before_anything_is_measured():
    from delivery.pipeline.values import check_field
    from delivery.steps.step import fields_of

    floor = next(f for f in fields_of(Compare) if f.name == "memory_floor_bytes")
    with pytest.raises(ValueError, match="a number of at least 0, got -5"):
        check_field(Compare, floor, -5)
