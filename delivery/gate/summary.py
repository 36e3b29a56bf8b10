"""Summary of one run's records, with the key names of `vllm bench serve` so that its parsers work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from delivery.errors import UsageError, did_you_mean
from delivery.gate.validity import rate_ratio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delivery.gate.record import RequestRecord

PERCENTILES = (50, 95, 99)
GOODPUT_KEYS = ("ttft", "tpot", "e2el")


def summarize(
    records: Sequence[RequestRecord], *, goodput: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Latencies in ms, throughputs per second, lengths in tokens.

    Latencies count from the scheduled arrival. goodput: limits in ms by `ttft`, `tpot`, `e2el`; a
    request within all of them counts towards `request_goodput`. A latency that no request has is 0.0.
    Raises UsageError `bad-goodput`.
    """
    for key in goodput or ():
        if key not in GOODPUT_KEYS:
            raise UsageError(
                "bad-goodput",
                f"unknown goodput metric {key!r}",
                hint=did_you_mean(key, GOODPUT_KEYS),
            )
    done = [r for r in records if r.error is None and r.last_token_s is not None]
    duration_s = duration(records)
    tokens_in = sum(r.prompt_tokens for r in done)
    tokens_out = sum(r.output_tokens for r in done)
    out: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": sum(r.error is not None for r in records),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": _per_second(len(done), duration_s),
        "output_throughput": _per_second(tokens_out, duration_s),
        "total_token_throughput": _per_second(tokens_in + tokens_out, duration_s),
        "achieved_rate_ratio": rate_ratio(records),
    }
    if goodput:
        good = sum(_within(r, goodput) for r in done)
        out["request_goodput"] = _per_second(good, duration_s)
    for kind, values in samples(done).items():
        out |= _statistics(kind, values)
    out |= _statistics("schedule_delay", [r.schedule_delay_ms for r in records])
    out["input_lens"] = [r.prompt_tokens for r in records]
    out["output_lens"] = [r.output_tokens for r in records]
    out["errors"] = [r.error or "" for r in records]
    return out


def samples(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Latency samples in ms by vLLM's names: ttft, tpot, itl (every gap between chunks), e2el."""
    return {
        "ttft": [v for r in records if (v := r.ttft_ms) is not None],
        "tpot": [v for r in records if (v := r.tpot_ms) is not None],
        "itl": [
            (b - a) * 1e3 for r in records for a, b in zip(r.token_times_s, r.token_times_s[1:], strict=False)
        ],
        "e2el": [v for r in records if (v := r.e2e_ms) is not None],
    }


def duration(records: Sequence[RequestRecord]) -> float:
    """Seconds from the first scheduled arrival to the last token."""
    ends = [r.last_token_s for r in records if r.last_token_s is not None]
    return max(ends) - min(r.scheduled_s for r in records) if ends else 0.0


def _statistics(kind: str, values: Sequence[float]) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64) if values else np.zeros(1)
    return {
        f"mean_{kind}_ms": float(array.mean()),
        f"median_{kind}_ms": float(np.median(array)),
        f"std_{kind}_ms": float(array.std()),
        **{f"p{p}_{kind}_ms": float(np.percentile(array, p)) for p in PERCENTILES},
    }


def _within(record: RequestRecord, goodput: Mapping[str, float]) -> bool:
    # A request of one token has no time per output token; it cannot be too slow there.
    measured = {"ttft": record.ttft_ms, "tpot": record.tpot_ms or 0.0, "e2el": record.e2e_ms}
    return all(
        (value := measured[key]) is not None and value <= limit_ms for key, limit_ms in goodput.items()
    )


def _per_second(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0
