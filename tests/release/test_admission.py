"""What may not be released."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from delivery.artifact import Artifact, Kind, Manifest
from delivery.errors import DataError, GateFailed, UsageError
from delivery.gate import waivers
from delivery.gate.report import Metric, Report, Verdict
from delivery.release.admission import admit

ENGINE = "e" * 64
CHECKPOINT = "c" * 64


def report(path: Path, check: str, verdict: str = "pass", subject: str = ENGINE, **details: str) -> Artifact:
    folder = path / check
    folder.mkdir()
    metrics = (Metric("tpot_p95_ms", 9.1, "ms", "lower", 7.5, "fail"),) if verdict == "fail" else ()
    Report(check, subject, Verdict(verdict), metrics, details=details).write(folder)
    return Artifact(folder, Manifest(Kind.REPORT, check, 1))


ALL = ("smoke", "evaluate", "compare")


@pytest.mark.parametrize("verdict", ["pass", "bootstrapped", "waived"])
def test_a_releasable_engine_passes(verdict: str, tmp_path: Path) -> None:
    reports = [report(tmp_path, check, verdict) for check in ALL]
    assert [r.check for r in admit([ENGINE], reports, required=ALL, runtime="deliver")] == list(ALL)


@pytest.mark.parametrize("verdict", ["fail", "inconclusive", "invalid"])
def test_a_verdict_that_does_not_release(verdict: str, tmp_path: Path) -> None:
    reports = [report(tmp_path, "smoke"), report(tmp_path, "compare", verdict)]
    with pytest.raises(GateFailed, match="compare does not allow a release") as caught:
        admit([ENGINE], reports, required=["compare"], runtime="deliver")
    assert caught.value.exit_code == 3
    assert f"its verdict is {verdict}" in caught.value.why
    assert ("tpot_p95_ms" in caught.value.why) == (verdict == "fail")


def test_a_stored_verdict_expires_with_its_waiver(tmp_path: Path) -> None:
    slow = Metric("tpot_p95_ms", 9.1, "ms", "lower", 7.5, "fail")
    waiver = {"metric": "tpot_p95_ms", "owner": "ann", "reason": "known", "expires": "2026-11-30"}
    judged = waivers.apply(Report("compare", ENGINE, Verdict.FAIL, (slow,)), [waiver], date(2026, 11, 1))
    assert judged.verdict is Verdict.WAIVED
    judged.write(tmp_path)
    stored = [Artifact(tmp_path, Manifest(Kind.REPORT, "compare", 1))]
    how: dict[str, Any] = {"required": ["compare"], "runtime": "deliver"}
    assert admit([ENGINE], stored, **how, today=date(2026, 11, 30)) == [judged]
    with pytest.raises(GateFailed, match="compare does not allow a release") as caught:
        admit([ENGINE], stored, **how, today=date(2026, 12, 1))
    assert "expired: tpot_p95_ms (until 2026-11-30)" in caught.value.why


def test_a_report_about_another_engine(tmp_path: Path) -> None:
    reports = [report(tmp_path, "compare", subject="a" * 64)]
    with pytest.raises(DataError, match="is about another engine") as caught:
        admit([ENGINE], reports, required=["compare"], runtime="deliver")
    assert caught.value.why == f"expected {ENGINE[:12]}, it judged {'a' * 12}"


def test_missing_reports_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="passed evaluate, compare") as caught:
        admit([ENGINE], [report(tmp_path, "smoke")], required=ALL, runtime="deliver")
    assert "got smoke" in caught.value.why
    with pytest.raises(UsageError, match="passed smoke") as caught:
        admit([ENGINE], [], required=["smoke"], runtime="deliver")
    assert "got none" in caught.value.why


def test_a_runtime_that_was_not_measured(tmp_path: Path) -> None:
    ours = [report(tmp_path, "compare")]
    with pytest.raises(DataError, match="served by vllm, which was not measured") as caught:
        admit([ENGINE, CHECKPOINT], ours, required=["compare"], runtime="vllm")
    assert "measured deliver" in caught.value.why


def test_a_runtime_of_which_nothing_was_measured(tmp_path: Path) -> None:
    """Also where the pipeline does not require a comparison."""
    smoke = [report(tmp_path, "smoke")]
    with pytest.raises(DataError, match="served by vllm, which was not measured") as caught:
        admit([ENGINE], smoke, required=["smoke"], runtime="vllm")
    assert caught.value.why == "no compare report is given"
    admit([ENGINE], smoke, required=["smoke"], runtime="deliver")


def test_a_runtime_that_was_measured(tmp_path: Path) -> None:
    theirs = [report(tmp_path, "compare", subject=CHECKPOINT, runtime="vllm")]
    admit([ENGINE, CHECKPOINT], theirs, required=["compare"], runtime="vllm")
    with pytest.raises(DataError, match="served by deliver"):
        admit([ENGINE, CHECKPOINT], theirs, required=["compare"], runtime="deliver")


def test_a_damaged_report(tmp_path: Path) -> None:
    artifact = report(tmp_path, "smoke")
    artifact.file("report.json").write_text("{", "utf-8")
    with pytest.raises(DataError, match="cannot be read"):
        admit([ENGINE], [artifact], required=["smoke"], runtime="deliver")
