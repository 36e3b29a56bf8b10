"""A smoke suite's answers in a report: the faults of each, counted, listed and shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivery.gate.limits import judge
from delivery.gate.outputs.expectations import Fault, faults
from delivery.gate.report import Finding
from delivery.report import charts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from delivery.gate.outputs.suite import Prompt, Suite
    from delivery.gate.report import Metric

COUNTED: Mapping[str, tuple[str, ...]] = {
    "smoke_failed_prompts": ("expectation", "empty"),
    "smoke_garbled_outputs": ("garbled",),
    "smoke_looping_outputs": ("loop",),
    "smoke_unstopped_outputs": ("unstopped",),
    "smoke_leaked_markers": ("marker",),
}
"""Metric → kinds of faults; each counts answers, not faults."""
_SHOWN_CHARACTERS = 700


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """One answer with its faults; `judged` is False for a suite that is only shown."""

    suite: str
    judged: bool
    prompt: Prompt
    text: str
    finish_reason: str | None
    faults: tuple[Fault, ...]

    @property
    def name(self) -> str:
        return f"{self.suite}/{self.prompt.id}"


def judge_answers(
    suites: Sequence[Suite], answers: Iterable[Mapping[str, Any]], special_tokens: Sequence[str]
) -> list[JudgedAnswer]:
    """Find the faults of every answer; `answers` are {suite, prompt, text, raw, finish_reason}."""
    by_name = {(s.name, p.id): (s, p) for s in suites for p in s.prompts}
    out = []
    for answer in answers:
        suite, prompt = by_name[answer["suite"], answer["prompt"]]
        found = faults(
            answer["text"], answer["raw"], answer["finish_reason"], prompt.expect, tuple(special_tokens)
        )
        out.append(
            JudgedAnswer(
                suite.name, suite.judged, prompt, answer["text"], answer["finish_reason"], tuple(found)
            )
        )
    return out


def counts(judged: Sequence[JudgedAnswer], limits: Mapping[str, Any]) -> list[Metric]:
    """How many answers of judged suites have each kind of fault, against their limits."""
    return [
        judge(
            metric,
            float(sum(any(f.kind in kinds for f in j.faults) for j in judged if j.judged)),
            limits,
        )
        for metric, kinds in COUNTED.items()
    ]


def findings(judged: Sequence[JudgedAnswer]) -> list[Finding]:
    """One sentence per fault, errors first."""
    out = [
        Finding("error" if j.judged else "info", f"{j.name}: {fault.text}")
        for j in judged
        for fault in j.faults
    ]
    return sorted(out, key=lambda f: f.severity != "error")


def cases(judged: Sequence[JudgedAnswer]) -> list[dict[str, str]]:
    """A test case per prompt, for JUnit."""
    return [
        {
            "name": j.name,
            "status": "fail" if j.faults and j.judged else "pass",
            "message": "\n".join([*(f.text for f in j.faults), f"answer: {j.text[:_SHOWN_CHARACTERS]}"]),
        }
        for j in judged
    ]


def table(judged: Sequence[JudgedAnswer]) -> dict[str, Any]:
    """Every prompt with its answer and what is wrong with it, faulty ones first."""
    rows = [
        [
            j.name,
            j.prompt.kind,
            _cut(str(j.prompt.messages[-1]["content"])),
            _cut(j.text),
            j.finish_reason or "",
            "\n".join(f.text for f in j.faults) or "fine",
        ]
        for j in sorted(judged, key=lambda j: not j.faults)
    ]
    return charts.table("Answers", ["prompt", "kind", "last message", "answer", "end", "seen"], rows)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} …"
