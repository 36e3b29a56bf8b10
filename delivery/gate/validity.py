"""Validity of a load measurement, checked before any comparison."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING

from delivery.gate.latency import MIN_REQUESTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delivery.gate.record import RequestRecord

    Run = Sequence[RequestRecord]


@dataclass(frozen=True, slots=True)
class ValidityLimits:
    """Limits on the measurement itself; shares are of 1, times in ms."""

    max_failed_ratio: float = 0.0
    min_requests: int = MIN_REQUESTS
    max_schedule_delay_ms: float = 10.0
    min_rate_ratio: float = 0.98


_OVERLOAD = (
    *("status 429", "status 503", "no whole answer within"),
    *("Too Many Requests", "Service Unavailable"),  # as `vllm bench serve` writes them down
)
"""Prefixes of the errors of requests that a server rejected, or left unanswered, for lack of capacity."""


def turned_away(run: Run) -> int:
    """Requests that a server refused or left unanswered because it could not keep up."""
    return sum(r.error is not None and r.error.startswith(_OVERLOAD) for r in run)


def why_not_kept_up(runs: Sequence[Run]) -> str:
    """Evidence that a side cannot keep up with the load; empty when it answered everything."""
    for number, run in enumerate(runs, 1):
        if count := turned_away(run):
            first = next(r for r in run if turned_away([r]))
            lost = f"{count} of {len(run)} requests ({first.error})"
            return f"it cannot keep up: run {number} did not answer {lost}"
    return ""


def rate_ratio(run: Run) -> float:
    """Achieved / requested rate of the sender: the span of arrivals over the span of sends.

    Only sending counts. A server that cannot keep up makes latencies long, not this ratio small.
    """
    if len(run) < 2:
        return 1.0
    asked = max(r.scheduled_s for r in run) - min(r.scheduled_s for r in run)
    took = max(r.sent_s for r in run) - min(r.scheduled_s for r in run)
    return asked / took if took > 0 else 1.0


def why_invalid_run(run: Run, limits: ValidityLimits, *, judged: bool = False) -> str:
    """The first rule that one run breaks; empty when it is valid.

    For the side that is `judged`, requests rejected for lack of capacity do not count as failed:
    they are a regression, not a fault of the measurement (`why_not_kept_up`).
    """
    failed = [r for r in run if r.error is not None and not (judged and turned_away([r]))]
    if len(failed) > limits.max_failed_ratio * len(run):
        return f"{len(failed)} of {len(run)} requests failed (first, {failed[0].id}: {failed[0].error})"
    silent = [r for r in run if r.error is None and (r.first_token_s is None or r.last_token_s is None)]
    if silent:
        return f"{len(silent)} of {len(run)} requests have neither answer nor error (first, {silent[0].id})"
    asked = len(run) - len(failed)
    if asked < limits.min_requests:
        return f"{asked} requests, {limits.min_requests} are needed"
    delay_ms = median(r.schedule_delay_ms for r in run)
    if delay_ms > limits.max_schedule_delay_ms:
        return (
            f"requests were sent {delay_ms:.1f} ms late (median; at most {limits.max_schedule_delay_ms:g} ms)"
        )
    if (ratio := rate_ratio(run)) < limits.min_rate_ratio:
        return f"the sender reached {ratio:.1%} of the requested rate (at least {limits.min_rate_ratio:.0%})"
    if broken := next((r for r in run if not _in_order(r)), None):
        return f"the times of {broken.id} are not finite, or not in order: a clock jumped"
    return ""


def _in_order(record: RequestRecord) -> bool:
    """Scheduled, sent, first token, last token: each finite and none before the one in front of it."""
    times = (record.scheduled_s, record.sent_s, record.first_token_s, record.last_token_s)
    known = [t for t in times if t is not None]
    return all(map(isfinite, known)) and all(a <= b for a, b in pairwise(known))


def why_lengths_differ(baseline: Run, candidate: Run) -> str:
    """Unequal output lengths between two runs, compared by request id; empty when they are equal."""
    ours = {r.id: r.output_tokens for r in candidate if r.error is None}
    theirs = {r.id: r.output_tokens for r in baseline if r.error is None}
    differ = [i for i in theirs if i in ours and ours[i] != theirs[i]]
    if differ:
        i = differ[0]
        return (
            f"output lengths differ in {len(differ)} requests "
            f"({i}: {ours[i]} tokens against {theirs[i]} in the baseline)"
        )
    if ours and not theirs.keys() & ours.keys():
        lengths = sorted(ours.values()), sorted(theirs.values())
        return "" if lengths[0] == lengths[1] else "the sets of output lengths differ"
    return ""


def why_invalid(
    baseline: Sequence[Run], candidate: Sequence[Run], limits: ValidityLimits, paired: bool
) -> str:
    """The first reason not to compare two sets of runs; empty when they can be compared."""
    for side, runs in (("baseline", baseline), ("candidate", candidate)):
        if not runs:
            return f"the {side} has no runs"
        for number, run in enumerate(runs, 1):
            if reason := why_invalid_run(run, limits, judged=side == "candidate"):
                return f"{side} run {number}: {reason}"
    if paired and len(baseline) != len(candidate):
        return f"{len(baseline)} baseline runs cannot be paired with {len(candidate)} candidate runs"
    if paired:
        pairs = list(zip(baseline, candidate, strict=True))
    else:
        pairs = [(baseline[0], run) for run in (*candidate, *baseline[1:])]
    for number, (theirs, ours) in enumerate(pairs, 1):
        if reason := why_lengths_differ(theirs, ours):
            of_baseline = not paired and number > len(candidate)
            named = f"baseline run {number - len(candidate) + 1}" if of_baseline else f"run {number}"
            return f"{named}: {reason}"
    return ""
