"""Capacity: the requests per second that one side can sustain, and the rate that an open loop may use.

Near its capacity a server's queue magnifies every change in speed (the waiting time of a queue grows
with 1 / (1 − utilisation)), so an open loop sends at most half of what the baseline can sustain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delivery.gate.record import RequestRecord

SHARE = 0.5
"""Of the baseline's capacity: the highest rate at which latencies are compared."""


def sustained_rate(records: Sequence[RequestRecord]) -> float | None:
    """Requests per second that were done while a closed loop was full; None when none was answered.

    A closed loop is full until its last request is sent. A request that was begun and not ended by then
    counts by the share of its tokens that had come: one that waited in the server's queue counts nothing.
    """
    done = [r for r in records if r.error is None and r.last_token_s is not None]
    if not done:
        return None
    start = min(r.sent_s for r in records)
    end = max(r.sent_s for r in records)
    if end <= start:  # everything was sent at once: until the last answer
        end = max(r.last_token_s or start for r in done)
    return sum(_share(r, end) for r in done) / (end - start) if end > start else None


def why_too_fast(rate: float, capacity: float | None) -> str:
    """Why `rate` requests/s is too fast for a baseline of this capacity; empty when it is not."""
    if capacity is None:
        return (
            "the baseline's capacity is not known, and an open loop may send at most half of it; "
            "measure the baseline again and accept it: deliver baseline update --reason TEXT"
        )
    if rate <= SHARE * capacity:
        return ""
    return (
        f"the workload sends {shown(rate)} requests/s to a baseline that can sustain {shown(capacity)}: "
        f"over {SHARE:.0%} of that, queueing magnifies every change; "
        f"send at most {rounded_down(SHARE * capacity)} (compare --rate, or the workload's arrival)"
    )


def shown(rate: float) -> str:
    """A human-readable rate: three digits, no exponent."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}"


def rounded_down(rate: float) -> str:
    """A rate in two significant digits that are not above it."""
    if not rate > 0:
        return "0"
    mantissa, _, exponent = f"{rate:.12e}".partition("e")
    digits = int(float(mantissa) * 10 + 1e-9)
    return f"{digits * 10.0 ** (int(exponent) - 1):g}"


def _share(record: RequestRecord, until_s: float) -> float:
    """The share of a request's answer that had arrived by a moment, 0 … 1."""
    times = record.token_times_s or (record.last_token_s or until_s,)
    return sum(t <= until_s for t in times) / len(times)
