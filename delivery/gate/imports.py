"""Results of other load generators as request records: `vllm bench serve` and GuideLLM.

The two use the same names differently. GuideLLM's `time_per_output_token_ms` is E2E divided by all
output tokens; what others call TPOT is its `inter_token_latency_ms`, and that is what is read here.

Latency counts from the scheduled arrival if the file has it: GuideLLM's does for strategies that have a
schedule (`targeted_start`), vLLM's never does.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from delivery.errors import DataError, Undecided
from delivery.gate.record import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_WITH_SCHEDULE = ("constant", "poisson", "trace", "replay")
"""GuideLLM's strategies whose targeted starts are a schedule of arrivals."""


def read_results(path: Path) -> tuple[str, list[list[RequestRecord]]]:
    """(which tool wrote it: "vllm" or "guidellm", one list of records per run).

    A vLLM file needs `--save-detailed`; its latencies count from sending, since it does not tell the
    schedule. Raises DataError `results-unreadable`, and Undecided `measurement-invalid` for a time that is
    not a finite number.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        if isinstance(data.get("benchmarks"), list):
            tool, runs = "guidellm", [_guidellm_run(one) for one in data["benchmarks"]]
        else:
            tool, runs = "vllm", [_vllm_run(data)]
        if not all(runs) or not runs:
            raise ValueError("it has no requests")
        return tool, runs
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            "results-unreadable",
            f"{path} holds no results that can be judged",
            why=f"{type(error).__name__}: {error}",
            hint="vllm bench serve --save-result --save-detailed, or guidellm's benchmarks.json",
        ) from error


def _vllm_run(data: Mapping[str, Any]) -> list[RequestRecord]:
    columns = [data[name] for name in ("input_lens", "output_lens", "ttfts", "itls")]
    errors = data.get("errors") or [""] * len(columns[0])
    starts = data.get("start_times") or [0.0] * len(columns[0])
    begin = min(starts, default=0.0)
    rows = zip(*columns, errors, starts, strict=True)
    return [
        _record(
            f"r{number}",
            start - begin,
            ttft_s=ttft,
            rest_s=sum(gaps),
            tokens_in=int(tokens_in),
            tokens_out=int(tokens_out),
            error=error or None,
        )
        for number, (tokens_in, tokens_out, ttft, gaps, error, start) in enumerate(rows)
    ]


def _guidellm_run(benchmark: Mapping[str, Any]) -> list[RequestRecord]:
    requests = benchmark["requests"]
    about = benchmark.get("config") or benchmark.get("args") or {}
    scheduled = (about.get("strategy") or {}).get("type_") in _WITH_SCHEDULE
    good: list[tuple[Mapping[str, Any], str | None]] = [
        (one, None) for one in requests.get("successful") or ()
    ]
    bad: list[tuple[Mapping[str, Any], str | None]] = [
        (one, str(one.get("error") or (one.get("info") or {}).get("error") or "failed"))
        for one in requests.get("errored") or ()
    ]
    rows = sorted(good + bad, key=lambda row: _start(row[0]))
    begin = min((_due(one, scheduled) for one, _ in rows), default=0.0)
    out = []
    for number, (one, error) in enumerate(rows):
        start, due = _start(one), _due(one, scheduled)
        tokens = int(one.get("output_tokens") or 0)
        gap_ms = float(one.get("inter_token_latency_ms") or 0.0)
        out.append(
            _record(
                f"r{number}",
                start - begin,
                due_s=due - begin,
                ttft_s=float(one.get("time_to_first_token_ms") or 0.0) / 1e3,
                rest_s=gap_ms * max(tokens - 1, 0) / 1e3,
                tokens_in=int(one.get("prompt_tokens") or 0),
                tokens_out=tokens,
                error=error,
            )
        )
    return out


def _start(request: Mapping[str, Any]) -> float:
    """Both names that GuideLLM's versions use."""
    return float(request["request_start_time"] if "request_start_time" in request else request["start_time"])


def _due(request: Mapping[str, Any], scheduled: bool) -> float:
    """When a request was to start; strategies without a schedule target the moment they are asked."""
    timings = (request.get("info") or {}).get("timings") or {}
    targeted = timings.get("targeted_start") if scheduled else None
    return _start(request) if targeted is None else min(float(targeted), _start(request))


def _record(
    name: str,
    start_s: float,
    *,
    due_s: float | None = None,
    ttft_s: float,
    rest_s: float,
    tokens_in: int,
    tokens_out: int,
    error: str | None,
) -> RequestRecord:
    if not (math.isfinite(ttft_s) and math.isfinite(rest_s)):
        raise Undecided(
            "measurement-invalid",
            f"the results of request {name} are not valid",
            why=f"time to first token {ttft_s} s, and {rest_s} s for the rest: expected finite numbers",
            hint="measure again",
        )
    first = None if error else start_s + ttft_s
    return RequestRecord(
        id=name,
        scheduled_s=start_s if due_s is None else due_s,
        sent_s=start_s,
        first_token_s=first,
        last_token_s=None if first is None else first + rest_s,
        prompt_tokens=tokens_in,
        output_tokens=tokens_out,
        finish_reason=None if error else "length",
        error=error,
    )
