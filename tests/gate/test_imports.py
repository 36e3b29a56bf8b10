"""Results of other load generators become the same records."""

import json

import pytest

from delivery.errors import DataError, Undecided
from delivery.gate.imports import read_results


def write(folder, data):
    path = folder / "results.json"
    path.write_text(json.dumps(data))
    return path


def test_vllm_bench_serve(tmp_path):
    data = {
        "input_lens": [10, 20],
        "output_lens": [3, 1],
        "ttfts": [0.1, 0.2],
        "itls": [[0.01, 0.03], []],
        "errors": ["", "timeout"],
        "start_times": [100.0, 100.5],
    }
    tool, (run,) = read_results(write(tmp_path, data))
    assert tool == "vllm"
    assert run[0].ttft_ms == pytest.approx(100)
    assert run[0].tpot_ms == pytest.approx(20)
    assert run[0].e2e_ms == pytest.approx(140)
    assert run[1].scheduled_s == 0.5
    assert run[1].error == "timeout"
    assert run[1].first_token_s is None


@pytest.mark.parametrize("start", ["start_time", "request_start_time"])
def test_guidellm_words_are_converted_by_name(tmp_path, start):
    request = {
        start: 50.0,
        "prompt_tokens": 8,
        "output_tokens": 5,
        "time_to_first_token_ms": 200.0,
        "inter_token_latency_ms": 25.0,
        "time_per_output_token_ms": 20.0,
    }
    failed = {start: 49.0, "error": "refused", "prompt_tokens": 8, "output_tokens": 0}
    data = {
        "benchmarks": [{"requests": {"successful": [request], "incomplete": [], "errored": [failed]}}] * 2
    }
    tool, runs = read_results(write(tmp_path, data))
    assert tool == "guidellm"
    assert len(runs) == 2
    bad, good = runs[0]
    assert bad.error == "refused"
    assert good.scheduled_s == 1.0
    assert good.tpot_ms == pytest.approx(25.0)
    assert good.ttft_ms == pytest.approx(200.0)
    assert good.e2e_ms == pytest.approx(300.0)


@pytest.mark.parametrize(("strategy", "ttft_ms"), [("poisson", 230.0), ("concurrent", 200.0)])
def test_guidellm_tells_the_schedule_and_the_error_of_a_request(tmp_path, strategy, ttft_ms):
    """Field by field as guidellm 0.6 serialises a request; latency counts from a scheduled arrival."""
    request = {
        "type_": "generative_request_stats",
        "request_id": "a",
        "info": {"timings": {"targeted_start": 49.97, "request_start": 50.0}, "error": None},
        "request_start_time": 50.0,
        "request_latency": 0.3,
        "prompt_tokens": 8,
        "output_tokens": 5,
        "time_to_first_token_ms": 200.0,
        "inter_token_latency_ms": 25.0,
        "time_per_output_token_ms": 60.0,
    }
    failed = {
        **request,
        "info": {"timings": {"targeted_start": None}, "error": "connection reset"},
        "request_start_time": 51.0,
        "output_tokens": None,
        "time_to_first_token_ms": None,
    }
    data = {
        "benchmarks": [
            {
                "config": {"strategy": {"type_": strategy, "rate": 5.0}},
                "requests": {"successful": [request], "incomplete": [], "errored": [failed]},
            }
        ]
    }
    _, ((good, bad),) = read_results(write(tmp_path, data))
    assert good.ttft_ms == pytest.approx(ttft_ms)
    assert good.schedule_delay_ms == pytest.approx(ttft_ms - 200.0)
    assert good.tpot_ms == pytest.approx(25.0)
    assert bad.error == "connection reset"
    assert bad.output_tokens == 0


@pytest.mark.parametrize(
    "change", [{"ttfts": [float("nan")]}, {"ttfts": [float("inf")]}, {"itls": [[float("nan")]]}]
)
def test_a_time_that_is_no_finite_number_is_no_measurement(tmp_path, change):
    data = {"input_lens": [16], "output_lens": [2], "ttfts": [0.1], "itls": [[0.01]]} | change
    with pytest.raises(Undecided, match="results of request r0 are not valid"):
        read_results(write(tmp_path, data))


GUIDELLM = {"request_start_time": 0.0, "time_to_first_token_ms": 3.0, "output_tokens": 2}


@pytest.mark.parametrize(
    "data",
    [
        {"mean_ttft_ms": 3.0},
        {"benchmarks": [{}]},
        [],
        {"input_lens": [1], "output_lens": [1, 2]},
        {"benchmarks": []},
        {"benchmarks": [{"requests": {"successful": []}}]},
        {"benchmarks": [{"requests": {"successful": [{**GUIDELLM, "output_tokens": float("inf")}]}}]},
        {"input_lens": [], "output_lens": [], "ttfts": [], "itls": []},
        {"input_lens": ["a"], "output_lens": [2], "ttfts": [0.1], "itls": [[0.1]]},
    ],
)
def test_averages_and_damaged_files_are_refused(tmp_path, data):
    with pytest.raises(DataError, match="no results that can be judged"):
        read_results(write(tmp_path, data))
