"""What compare measures: a candidate alone, or beside its baseline; and the file that records it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from delivery.bench.facts import facts
from delivery.bench.paired import measure_alone, measure_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from delivery.bench.measured import Measured
    from delivery.bench.paired import Task
    from delivery.bench.session import Session
    from delivery.bench.workload import Workload

MEASUREMENT = "compare.json"


def measure(
    candidate: AbstractContextManager[Session],
    baseline: AbstractContextManager[Session] | None,
    workload: Workload,
    task: Task,
    *,
    runs: int,
    limit: float,
    metrics: Sequence[str],
    foreign_limit: float,
) -> Measured:
    """Open the sides and measure them: `runs` runs of a candidate without a baseline, else pairs until a look
    at `metrics` against `limit` decides."""
    if baseline is None:
        with candidate as alone:
            return measure_alone(alone, workload, runs, task, foreign_limit)
    with baseline as before, candidate as now:
        return measure_pairs(before, now, workload, limit, task, metrics, foreign_limit)


def write(
    folder: Path,
    made: Measured,
    *,
    device: str,
    engine: str,
    baseline_engine: str | None,
    workload: Mapping[str, Any],
    kv_tokens: int,
    offered_rate: float | None,
) -> None:
    """Write the request records, and MEASUREMENT with everything else.

    engine, baseline_engine: digests. kv_tokens: KV cache size of each side; 0 for imported runs.
    offered_rate: requests/s of an open loop; None for a closed one.
    """
    made.write(folder)
    measured = {
        **facts(device),
        "engine": engine,
        "baseline_engine": baseline_engine,
        "workload": workload,
        "kv_tokens": kv_tokens,
        "offered_rate": offered_rate,
        **made.to_json(),
    }
    (folder / MEASUREMENT).write_text(json.dumps(measured, indent=1, ensure_ascii=False) + "\n", "utf-8")
