"""The verdict of compare: validity, latency, memory, targets, the last release, the self-test."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from delivery.bench.comparison import MEASUREMENT
from delivery.bench.measured import Measured, snapshot
from delivery.gate.capacity import why_too_fast
from delivery.gate.family import FamilyVerdict, compare_runs
from delivery.gate.limits import judge as judge_limit
from delivery.gate.looks import ONLY, Look, looks
from delivery.gate.lookup import Found, Place, find, find_or_make
from delivery.gate.memory import compare_memory
from delivery.gate.metrics import DEFAULT_FAMILY, UNDER_LOAD
from delivery.gate.report import Finding, Report, Verdict, worst
from delivery.gate.selftest import self_test
from delivery.report import compose, latencies, load
from delivery.report.comparison_baseline import place_of
from delivery.report.comparison_parts import Part, Reference, Settings
from delivery.report.latencies import values_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from delivery.artifact import Artifact
    from delivery.gate.baseline import Snapshot


@dataclass(frozen=True)
class Judge:
    """Judges one measurement; pure but for a first baseline that it may record under `local`."""

    model: str
    measurement: Artifact
    gate: Mapping[str, Any]
    committed: Path
    local: Path
    inputs: Mapping[str, str]
    settings: Settings

    @cached_property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.measurement.file(MEASUREMENT).read_text("utf-8"))
        return found

    @cached_property
    def measured(self) -> Measured:
        return Measured.read(self.measurement.path, self.data)

    @property
    def family(self) -> tuple[str, ...]:
        return tuple(self.gate.get("metrics") or DEFAULT_FAMILY)

    @property
    def rate(self) -> float | None:
        """Requests/s that the open loop asks; None for a closed loop."""
        found: float | None = self.data.get("offered_rate")
        return found

    def report(self) -> Report:
        """Raises BaselineError when a baseline is missing and may not be made."""
        ours = self.measured.candidate
        if reason := load.why_worthless(self.measured, self.rate, self.settings.foreign_limit):
            return self._made([_worthless(reason)])
        found = self._baseline()
        if found is not None and found.made_now:
            return self._bootstrapped(found)
        reference = self._reference(found)
        if self.rate is not None and (reason := why_too_fast(self.rate, reference.capacity)):
            return self._made([_worthless(reason)], reference, found)
        if found is not None and not reference.paired and self._is_itself(found):
            return self._accepted(found, reference)
        latency = self._compare(reference)
        crept = self._anchor(found)
        told = [Finding("info" if latency.status is Verdict.PASS else "error", latency.reason)]
        if latency.status is not Verdict.PASS and reference.origin.get("engine") == self.data["engine"]:
            told.append(Finding("warning", load.SAME_ENGINE))
        parts = [
            Part(latency.status, latencies.metrics(latency, self.settings.limit), told),
            load.kept_up(self.rate, ours, reference.capacity),
            self._memory(reference.memory),
            self._targets(),
            crept,
            self._self_test(reference),
        ]
        anchor = found.baseline.anchor if found is not None else None
        if anchor and latency.status is not Verdict.FAIL and crept.verdict is Verdict.FAIL:
            reference = replace(reference, origin=compose.baseline_details(anchor))
        return self._made(parts, reference, found)

    def _bootstrapped(self, found: Found) -> Report:
        """Judged without a comparison; only what passes everything else becomes the baseline."""
        if reason := load.why_no_baseline(self.measured, self.rate, self.settings.foreign_limit):
            return self._made([_worthless(reason)], None, found)
        current = found.baseline.current
        itself = Reference(current.runs, current.memory, paired=False, origin={})
        absolute = [self._targets(), self._self_test(itself)]
        if worst([part.verdict for part in absolute]).releases:
            found.record()
            text = f"{found.note}: this one became the baseline"
        else:
            text = f"{found.note}: this one failed and does not become the baseline"
        parts = [Part(Verdict.BOOTSTRAPPED, findings=[Finding("warning", text)]), *absolute]
        return self._made(parts, None, found)

    def _is_itself(self, found: Found) -> bool:
        return found.baseline.current.measurement == self.measurement.digest

    def _accepted(self, found: Found, reference: Reference) -> Report:
        """The measurement that was made the baseline: compared with itself it would only show its noise."""
        text = f"this measurement is the baseline: “{found.baseline.current.reason}”"
        parts = [Part(findings=[Finding("info", text)]), self._targets(), self._anchor(found)]
        return self._made([*parts, self._self_test(reference)], reference, found)

    # what the candidate is compared with

    def _baseline(self) -> Found | None:
        """The stored baseline; when both sides ran it is optional and gives the anchor alone."""
        place = self._place()
        if self.measured.baseline is not None:
            stored = find(place, self.committed, self.local)
            return None if stored is None else Found(stored, made_now=False)
        missing = str(self.gate.get("missing_baseline", "fail"))
        return find_or_make(place, self.committed, self.local, self.snapshot("first measurement"), missing)

    def _place(self) -> Place:
        return place_of(self.model, self.data)

    def snapshot(self, reason: str) -> Snapshot:
        """The candidate as a baseline keeps it."""
        side = self.measured.candidate
        return snapshot(
            self.data,
            side,
            values_of(side.runs),
            reason=reason,
            commit=compose.current_commit(),
            recorded=compose.today(),
            measurement=self.measurement.digest,
        )

    def _reference(self, found: Found | None) -> Reference:
        """The runs beside the candidate's, unless the baseline has moved on since they were measured."""
        side, partner = self.measured.baseline, self.data["baseline_engine"]
        current = found.baseline.current if found is not None else None
        known = compose.baseline_details(current) if current is not None else {}
        if side is not None and (self.settings.partner_named or current is None or current.engine == partner):
            same = current is not None and current.engine == partner
            origin = known if same else {"engine": partner}
            return Reference(side.runs, side.memory or {}, True, origin, side.capacity)
        assert current is not None
        return Reference(current.runs, current.memory, False, known, current.capacity)

    # the parts

    def _compare(self, reference: Reference) -> FamilyVerdict:
        ours = self.measured.candidate.runs
        return compare_runs(
            reference.runs,
            ours,
            metrics=self.family,
            limit=self.settings.limit,
            paired=reference.paired,
            look=self._look(reference),
        )

    def _look(self, reference: Reference | None) -> Look:
        """Which look the runs were judged at: pairs have several, stored runs one."""
        if reference is None or not reference.paired:
            return ONLY
        pairs = len(self.measured.candidate.runs)
        return next((look for look in looks() if look.pairs == pairs), ONLY)

    def _memory(self, baseline: Mapping[str, float]) -> Part:
        ours = self.measured.candidate.memory
        if ours is None:
            return Part(findings=[Finding("info", "memory cannot be seen through a URL and was not judged")])
        floor = self.settings.memory_floor_bytes if self.data["device"]["kind"] == "cpu" else 0
        verdict = compare_memory(baseline, ours, self.settings.memory_limit, floor_bytes=floor)
        findings = [] if verdict.status is Verdict.PASS else [Finding("error", f"memory: {verdict.reason}")]
        return Part(verdict.status, latencies.memory_metrics(verdict, self.settings.memory_limit), findings)

    def _targets(self) -> Part:
        """Absolute targets: the `slo` block, and limits of metrics that are measured here."""
        side = self.measured.candidate
        values = values_of(side.runs) | {m.name: m.value for m in latencies.shown(side)}
        if side.memory is not None and "drift_ratio" in side.memory:
            values["memory_drift_ratio"] = side.memory["drift_ratio"]
        limits, slo = self.gate.get("limits", {}), self.gate.get("slo", {})
        # Each by itself: a name may have a bound in both.
        asked = [(targets, name) for targets in (limits, slo) for name in targets if name in UNDER_LOAD]
        made = [judge_limit(name, values[name], targets) for targets, name in asked if name in values]
        unseen = [Finding("error", load.not_seen(name)) for name in slo if name not in values]
        idle = [n for n in limits if n in UNDER_LOAD and n not in values and n not in slo]
        verdicts = [Verdict(m.status) for m in made] + [Verdict.INVALID] * len(unseen)
        told = latencies.over_limit(made) + [Finding("warning", load.no_effect(name)) for name in idle]
        return Part(worst(verdicts), made, told + unseen)

    def _anchor(self, found: Found | None) -> Part:
        """The last release, so that small losses do not add up."""
        anchor = found.baseline.anchor if found is not None else None
        if anchor is None:
            return Part()
        verdict = compare_runs(
            anchor.runs,
            self.measured.candidate.runs,
            metrics=self.family,
            limit=self.settings.limit,
            paired=False,
        )
        since = f"against the last release ({anchor.commit[:12] or anchor.engine[:12]}): "
        memory = self._memory(anchor.memory)
        lost = memory if memory.verdict is Verdict.FAIL else Part()
        if verdict.status is Verdict.FAIL:
            slower = [m for m in latencies.metrics(verdict, self.settings.limit) if m.status == Verdict.FAIL]
            findings = [Finding("error", verdict.reason), *lost.findings]
            lost = Part(Verdict.FAIL, [*slower, *lost.metrics], findings)
        if lost.verdict is not Verdict.FAIL:
            # The baseline decides whether memory can be compared at all; here it is told.
            untold = memory.findings if memory.verdict is Verdict.INVALID else []
            findings = [Finding("info", f"{since}{verdict.status.value}")]
            return Part(findings=[*findings, *(Finding("warning", f"{since}{f.text}") for f in untold)])
        return replace(lost, findings=[replace(f, text=f"{since}{f.text}") for f in lost.findings])

    def _self_test(self, reference: Reference) -> Part:
        if not self.settings.self_test:
            return Part()
        cases = self_test(
            reference.runs,
            reference.memory,
            metrics=self.family,
            limit=self.settings.limit,
            memory_limit=self.settings.memory_limit,
        )
        missed = [c for c in cases if not c.passed]
        told = [
            Finding("error", f"self-test: {c.name}: expected {c.expected.value}, got {c.got.value}")
            for c in missed
        ]
        told = told or [
            Finding("info", f"self-test: all {len(cases)} injected changes were judged correctly")
        ]
        if not reference.memory:
            told.append(Finding("info", "self-test: the baseline has no memory to change; latencies only"))
        metric = judge_limit("self_test_missed", float(len(missed)), {"self_test_missed": 0})
        return Part(Verdict(metric.status), [metric], told)

    def _made(
        self, parts: Sequence[Part], reference: Reference | None = None, found: Found | None = None
    ) -> Report:
        side = self.measured.candidate
        judged = [metric for part in parts for metric in part.metrics]
        noise = latencies.noise_findings(side.runs, self.family) if len(side.runs) > 1 else []
        kind = "pairs" if reference is not None and reference.paired else "runs"
        return Report(
            check="compare",
            subject=self.inputs["engine"],
            verdict=worst([part.verdict for part in parts]),
            metrics=tuple(latencies.merged(judged, latencies.shown(side) if side.runs else [])),
            findings=(*(f for part in parts for f in part.findings), *noise),
            evidence=(MEASUREMENT, *self.measured.files()),
            details={
                "runtime": side.runtime,
                "besides": worst([p.verdict for p in parts if p.verdict is not Verdict.FAIL]).value,
                "commit": compose.current_commit(),
                "baseline": dict(reference.origin) if reference else None,
                "level": f"{1 - 2 * self._look(reference).error:.0%}".replace("%", " %"),
                "runs": f"{len(side.runs)} {kind} of {self.data['workload']['requests']} requests",
                "reproduce": compose.command("compare", self.inputs, **self.settings.options),
                "facts": compose.fact_rows(
                    self.data,
                    workload=self.data["workload"]["name"],
                    runtime=side.runtime,
                    reserved_kv_tokens=self.data["kv_tokens"],
                    **{k: v for k, v in side.settings.items() if v not in (None, "", "auto")},
                ),
                "charts": self._charts(reference, found) if side.runs else [],
            },
        )

    def _charts(self, reference: Reference | None, found: Found | None) -> list[dict[str, Any]]:
        side, known = self.measured.candidate, reference or Reference((), {}, paired=False, origin={})
        drawn = latencies.charts_of(side, known.runs, known.memory, self.family)
        return drawn + latencies.trend(found.baseline if found else None, side, self.family)


def _worthless(reason: str) -> Part:
    return Part(Verdict.INVALID, findings=[Finding("error", reason)])
