"""Waivers: a named failure accepted by an owner until a date. Printed everywhere; expires by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from typing import TYPE_CHECKING, Any

from delivery.errors import UsageError, did_you_mean
from delivery.gate.metrics import definition
from delivery.gate.report import Finding, Report, Verdict, worst

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_KEYS = ("metric", "check", "owner", "reason", "expires")
_DETAIL = "waivers"
"""Where a report keeps the waivers that it was judged with."""


@dataclass(frozen=True, slots=True)
class Waiver:
    """Lets `metric` fail, in every check or in `check` alone, up to and including `expires`."""

    metric: str
    owner: str
    reason: str
    expires: date
    check: str = ""

    def covers(self, report: Report, metric: str) -> bool:
        """A metric without a corpus covers every corpus, as it does in limits."""
        return self.metric in (metric, definition(metric).name) and self.check in ("", report.check)


def parse(entry: Mapping[str, Any]) -> Waiver:
    """One entry of the pipeline's `gate: waivers:`. Raises UsageError `bad-waiver`, `unknown-metric`."""
    for key in entry:
        if key not in _KEYS:
            raise _bad(entry, f"unknown key {key!r}", did_you_mean(str(key), _KEYS))
    for key in ("metric", "owner", "reason", "expires"):
        if not str(entry.get(key) or "").strip():
            raise _bad(entry, f"it has no {key}", "give metric, owner, reason and expires (YYYY-MM-DD)")
    try:
        expires = date.fromisoformat(str(entry["expires"])[:10])
    except ValueError as error:
        raise _bad(entry, f"expires: {error}", "write the day as YYYY-MM-DD") from error
    definition(str(entry["metric"]))
    return Waiver(
        metric=str(entry["metric"]),
        owner=str(entry["owner"]),
        reason=str(entry["reason"]),
        expires=expires,
        check=str(entry.get("check") or ""),
    )


def apply(report: Report, waivers: Iterable[Waiver | Mapping[str, Any]], today: date) -> Report:
    """The report with its waived failures marked.

    The verdict becomes `waived` when every failing metric is covered; a failure without a metric, an
    inconclusive or an invalid measurement cannot be waived. If there is such a part besides the failure
    (`details["besides"]`, or another metric's status), the verdict becomes that part's. Expired waivers are
    named and do nothing.
    """
    known = [w if isinstance(w, Waiver) else parse(w) for w in waivers]
    failing = [m.name for m in report.metrics if m.status == Verdict.FAIL]
    findings: list[Finding] = []
    waived: set[str] = set()
    in_force: list[dict[str, str]] = []
    for waiver in known:
        hit = [name for name in failing if waiver.covers(report, name)]
        if not hit:
            continue
        said = f"{waiver.metric}, owner {waiver.owner}: {waiver.reason} (until {waiver.expires.isoformat()})"
        if waiver.expires < today:
            findings.append(Finding("error", f"waiver expired: {said}"))
        else:
            waived.update(hit)
            in_force.append({"metric": waiver.metric, "expires": waiver.expires.isoformat()})
            findings.append(Finding("warning", f"waived: {said}"))
    if not findings:
        return report
    everything = bool(failing) and waived >= set(failing) and report.verdict is Verdict.FAIL
    return replace(
        report,
        verdict=_left(report) if everything else report.verdict,
        metrics=tuple(
            replace(m, status=Verdict.WAIVED.value) if m.status == Verdict.FAIL and m.name in waived else m
            for m in report.metrics
        ),
        findings=(*findings, *report.findings),
        details={**report.details, _DETAIL: in_force} if in_force else report.details,
    )


def expired(report: Report, today: date) -> list[str]:
    """Waivers, as `METRIC (until DAY)`, that a stored report's verdict rests on and that no longer hold."""
    return [
        f"{waiver['metric']} (until {waiver['expires']})"
        for waiver in report.details.get(_DETAIL, ())
        if date.fromisoformat(waiver["expires"]) < today
    ]


def _left(report: Report) -> Verdict:
    """The verdict of a report once its failures are waived."""
    statuses = [m.status for m in report.metrics] + [str(report.details.get("besides", "shown"))]
    return worst([Verdict.WAIVED, *(Verdict(s) for s in statuses if s not in ("shown", Verdict.FAIL))])


def _bad(entry: Mapping[str, Any], why: str, hint: str) -> UsageError:
    named = entry.get("metric") or "?"
    return UsageError("bad-waiver", f"the waiver of {named} is not valid", why=why, hint=hint)
