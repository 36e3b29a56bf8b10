"""Measuring the noise of one engine against itself (A/A)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delivery.bench.paired import measure_alone
from delivery.bench.plan import check_lengths, engine_options, offered_rate
from delivery.bench.session import worker_session
from delivery.bench.workload import load_workload
from delivery.device import resolve_device
from delivery.errors import Undecided
from delivery.gate import noise
from delivery.gate.capacity import why_too_fast
from delivery.gate.metrics import DEFAULT_FAMILY, latency_kind, sample

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class _Quiet:
    def advance(self, amount: float = 1) -> None: ...
    def note(self, text: str) -> None: ...


def measure_noise(
    engine: Path,
    workload: str,
    runs: int,
    device: str,
    metrics: Sequence[str] = DEFAULT_FAMILY,
) -> dict[str, dict[str, Any]]:
    """Metric → value_ms, spread, minimum_effect (shares of 1) and noisy, over `runs` runs.

    Raises UsageError `request-too-long` for a workload that the engine cannot hold; Undecided
    `measurement-invalid` for requests that failed, and for an open loop that asks over half of what the
    engine sustains.
    """
    load = load_workload(workload)
    with worker_session(engine, resolve_device(device), engine_options(load)) as session:
        if (most := session.settings.get("max_model_len")) is not None:
            check_lengths(load, "the engine holds", most)
        made = measure_alone(session, load, runs, _Quiet())
    requests = [request for run in made.candidate.runs for request in run]
    if failed := [request for request in requests if request.error is not None]:
        what = f"{len(failed)} of {len(requests)} requests failed"
        raise Undecided("measurement-invalid", what, why=f"first: {failed[0].error}")
    rate = offered_rate(load)
    if rate is not None and (why := why_too_fast(rate, made.candidate.capacity)):
        raise Undecided("measurement-invalid", "the noise of a queue is not the noise of the engine", why=why)
    out = {}
    for name in metrics:
        kind, percentile = latency_kind(name)
        samples = [[v for r in run if (v := sample(r, kind)) is not None] for run in made.candidate.runs]
        found = noise.measure(samples, percentile)
        out[name] = {
            "value_ms": found.percentile_ms,
            "spread": found.spread,
            "minimum_effect": found.minimum_effect,
            "noisy": found.noisy,
        }
    return out
