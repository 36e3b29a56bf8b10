"""JUnit XML as GitLab and GitHub read it: a test case per judged metric and per case of the check.

GitLab takes the suite's name from `classname` and drops test cases whose name appears twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from delivery.report import words
from delivery.report.headline import headline

if TYPE_CHECKING:
    from delivery.gate.report import Metric, Report

_OUTCOMES = {"fail": "failure", "inconclusive": "error", "invalid": "error", "waived": "skipped"}


def document(report: Report) -> str:
    """One test suite named after the check."""
    cases = [("verdict", report.verdict.value, _summary(report))]
    cases += [(m.name, m.status, _told(m)) for m in report.metrics if m.status != "shown"]
    cases += [
        (_one_line(str(case["name"])), str(case["status"]), str(case.get("message", "")))
        for case in report.details.get("cases", ())
    ]
    suites = ET.Element("testsuites", name="deliver")
    suite = ET.SubElement(suites, "testsuite", name=f"deliver.{report.check}")
    count = {"failure": 0, "error": 0, "skipped": 0}
    for name, status, message in _unique(cases):
        element = ET.SubElement(suite, "testcase", classname=f"deliver.{report.check}", name=name, time="0")
        kind = _OUTCOMES.get(status)
        if kind is None:
            continue
        count[kind] += 1
        outcome = ET.SubElement(element, kind, message=_one_line(message) or status)
        if kind != "skipped":
            outcome.set("type", status)
            outcome.text = _printable(message)
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(count["failure"]))
    suite.set("errors", str(count["error"]))
    suite.set("skipped", str(count["skipped"]))
    ET.indent(suites, " ")
    body = ET.tostring(suites, encoding="unicode", xml_declaration=False)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _told(metric: Metric) -> str:
    parts = [f"{words.title(metric.name)}: {words.amount(metric.value, metric.unit)}"]
    parts += [f"baseline {words.amount(metric.baseline, metric.unit)}"] if metric.baseline is not None else []
    parts += [f"change {text}"] if (text := words.change(metric)) else []
    parts += [f"limit {words.limit(metric)}"] if metric.limit is not None else []
    return ", ".join(parts)


def _summary(report: Report) -> str:
    top = headline(report)
    lines = [w.sentence() for w in top.worse]
    lines += [f"{question}: {answer}" for question, answer in top.answers]
    lines += [f"{f.severity}: {f.text}" for f in report.findings]
    return "\n".join([*lines, top.command] if top.command else lines)


def _unique(cases: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    taken: set[str] = set()
    out = []
    for name, status, message in cases:
        free, number = name, 1
        while free in taken:
            number += 1
            free = f"{name} ({number})"
        taken.add(free)
        out.append((free, status, message))
    return out


def _one_line(text: str) -> str:
    return " ".join(_printable(text).split())[:500]


def _printable(text: str) -> str:
    """Without the control characters that XML 1.0 cannot hold; model output has any of them."""
    return "".join(c for c in text if c in "\t\n" or (c >= " " and c not in "\ufffe\uffff" and not _lone(c)))


def _lone(c: str) -> bool:
    return "\ud800" <= c <= "\udfff"
