"""Results of other load generators become the same records."""

import json

import pytest

from delivery.errors import DataError
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


@pytest.mark.parametrize(
    "data", [{"mean_ttft_ms": 3.0}, {"benchmarks": [{}]}, [], {"input_lens": [1], "output_lens": [1, 2]}]
)
def test_averages_and_damaged_files_are_refused(tmp_path, data):
    with pytest.raises(DataError, match="no results that can be judged"):
        read_results(write(tmp_path, data))
