"""How a smoke measurement is judged: limits, the planned memory, the timed runs of a baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from delivery.gate.alarm import coarse_alarm
from delivery.gate.limits import judge
from delivery.gate.report import Finding
from delivery.report import compose, timings

if TYPE_CHECKING:
    from delivery.gate.lookup import Found
    from delivery.gate.report import Metric

LIMITS: Mapping[str, Any] = {
    "smoke_failed_prompts": 0,
    "smoke_garbled_outputs": 0,
    "smoke_looping_outputs": 0,
    "smoke_unstopped_outputs": 0,
    "smoke_open_turns": 0,
    "smoke_leaked_markers": 0,
    "smoke_greedy_agreement_ratio": 0.7,
}
"""What holds unless the pipeline's `gate: limits:` says otherwise."""
_PLANNED = ("weights_bytes", "kv_bytes", "overhead_bytes", "planned_peak_bytes", "runtime_bytes")


def numbers(measured: Mapping[str, Any], limits: Mapping[str, Any], memory_limit: float) -> list[Metric]:
    """Loading, perplexity, agreement with the source, and memory: on a GPU against the plan, within
    `memory_limit` (0.1: 10 %)."""
    memory = measured["memory"]
    out = [
        judge("load_s", measured["load_s"], limits),
        judge("smoke_open_turns", float(measured["open_turns"]), limits),
    ]
    if measured["reference"]["tokens"]:
        nll = measured["reference"]["nll"] / measured["reference"]["tokens"]
        out.append(judge("smoke_perplexity", math.exp(min(nll, 700.0)), limits))
    if measured["agreement"] is not None:
        same, total = (sum(part) for part in zip(*measured["agreement"], strict=True))
        out.append(judge("smoke_greedy_agreement_ratio", same / total if total else 0.0, limits))
    planned = sum(memory.get(part, 0.0) for part in _PLANNED)
    bounds = dict(limits)
    if measured["device"]["kind"] == "cuda":
        bounds.setdefault(
            "process_bytes",
            {"min": planned * (1 - memory_limit), "max": planned * (1 + memory_limit)},
        )
    out.append(judge("process_bytes", memory["process_bytes"], bounds))
    out.append(judge("planned_bytes", planned, limits))
    return out


def timing(
    found: Found | None, measured: Mapping[str, Any], limits: Mapping[str, Any], limit: float
) -> tuple[list[Metric], list[Finding], dict[str, str] | None]:
    """P50 and P95 of the timed runs, against the baseline's where there is one; findings, and the baseline
    as a report shows it. limit: largest ratio of both."""
    ours = measured["timings_ms"]
    if found is None or found.made_now:
        return (
            timings.metrics(ours, limits=limits),
            [Finding("info", "no baseline for the timed runs")],
            None,
        )
    before = found.baseline.current
    alarm = coarse_alarm(before.samples["timings_ms"], ours, limit)
    metrics = timings.metrics(ours, before.samples["timings_ms"], limit, alarm, limits)
    return metrics, [timings.finding(alarm)], compose.baseline_details(before)


def timed_workload(measured: Mapping[str, Any], runs: int) -> dict[str, Any]:
    """What identifies the timed runs: the prompt's tokens, the output length and the number of runs."""
    suite = measured["suites"][0]
    timed = next(
        a
        for a in measured["answers"]
        if a["suite"] == suite["name"] and a["prompt"] == suite["timing_prompt"]
    )
    return {
        "check": "smoke",
        "prompt_tokens": len(timed["prompt_ids"]),
        "output_tokens": suite["timing_tokens"],
        "runs": runs,
    }
