"""Whether an engine may be released: its reports pass, are about it, and measured its runtime."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from delivery.errors import DataError, GateFailed, UsageError
from delivery.gate import waivers
from delivery.gate.report import FILE_NAME, Report

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delivery.artifact import Artifact

_SHORT = 12
_RUNTIME = "runtime"
_BUNDLED = "deliver"
_MEASURES = "compare"


def admit(
    subjects: Sequence[str],
    reports: Iterable[Artifact],
    *,
    required: Sequence[str],
    runtime: str,
    today: date | None = None,
) -> list[Report]:
    """The reports, when they allow a release.

    subjects: digests that a report may be about (the engine's, and its checkpoint's where that is
    what another runtime serves). required: checks that must have judged. runtime: what will serve.
    today: the day on which waivers have to hold; default: today in UTC.

    Raises UsageError `reports-missing`, DataError `report-damaged`, `report-subject`,
    `runtime-not-measured`, GateFailed `not-releasable`.
    """
    found = [read_report(artifact) for artifact in reports]
    missing = [check for check in required if check not in {r.check for r in found}]
    if missing:
        judged = ", ".join(r.check for r in found) or "none"
        raise UsageError(
            "reports-missing",
            f"nothing shows that {subjects[0][:_SHORT]} passed {', '.join(missing)}",
            why=f"expected reports of {', '.join(required)}, got {judged}",
            hint=f"--report REF for each; deliver {missing[0]} --engine {subjects[0][:_SHORT]} makes one",
        )
    for report in found:
        if report.subject not in subjects:
            raise DataError(
                "report-subject",
                f"the {report.check} report is about another engine",
                why=f"expected {subjects[0][:_SHORT]}, it judged {report.subject[:_SHORT]}",
                hint=f"deliver {report.check} --engine {subjects[0][:_SHORT]}",
            )
        if not report.verdict.releases:
            failed = [m.name for m in report.metrics if m.status == "fail"]
            raise GateFailed(
                "not-releasable",
                f"{report.check} does not allow a release of {subjects[0][:_SHORT]}",
                why=f"its verdict is {report.verdict}" + (f": {', '.join(failed)}" if failed else ""),
                hint="deliver inspect shows the report; a waiver in the pipeline's gate section lets it pass",
            )
        if over := waivers.expired(report, today or datetime.now(UTC).date()):
            raise GateFailed(
                "not-releasable",
                f"{report.check} does not allow a release of {subjects[0][:_SHORT]}",
                why=f"its verdict rests on a waiver that has expired: {', '.join(over)}",
                hint=f"deliver run, or deliver {report.check}, judges the measurement again",
            )
    measured = sorted({_measured_runtime(r) for r in found if r.check == _MEASURES})
    # Other checks run in the bundled engine: without a compare they still tell of that one.
    if runtime not in (measured or [_BUNDLED]):
        raise DataError(
            "runtime-not-measured",
            f"this release would be served by {runtime}, which was not measured",
            why=f"the compare report measured {', '.join(measured)}"
            if measured
            else "no compare report is given",
            hint="deliver compare --runtime URL of that server, then package with its report",
        )
    return found


def read_report(artifact: Artifact) -> Report:
    """The judgement inside a report artifact. Raises DataError `report-damaged`."""
    try:
        return Report.read(artifact.path)
    except (OSError, ValueError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise DataError(
            "report-damaged",
            f"{artifact.file(FILE_NAME)} cannot be read",
            why=f"{type(error).__name__}: {error}",
            hint="run the check that made it again",
        ) from error


def _measured_runtime(report: Report) -> str:
    """Which server a compare report measured; the bundled engine unless it says otherwise."""
    return str(report.details.get(_RUNTIME, _BUNDLED))
