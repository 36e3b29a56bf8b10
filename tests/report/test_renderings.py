"""Renderings of one report: what a machine parses and what a person reads."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from delivery.gate.limits import judge
from delivery.gate.report import Finding, Metric, Report, Verdict
from delivery.report import RENDERINGS, charts, render
from delivery.report.compose import current_commit
from delivery.report.headline import headline
from delivery.report.markdown import MAX_BYTES
from delivery.report.svg import ticks
from delivery.report.words import amount, limit, number

FACTS = {"Device": "Test CPU, 2 cores (test-cpu-8ff0)", "Workload": "demo"}
HOSTILE = "</td><script>alert('x')</script> \x00\x1b[31m ]]> | `a` @all \ufffe"


def failed() -> Report:
    slow = [10.0 + i % 7 for i in range(130)]
    return Report(
        "compare",
        "3fa9c1" + "0" * 58,
        Verdict.FAIL,
        metrics=(
            Metric("tpot_p95_ms", 9.1, "ms", "lower", 8.625, "fail", 7.5, (8.775, 9.375)),
            Metric("ttft_p95_ms", 231.4, "ms", "lower", 264.5, "pass", 230.0, (225.0, 239.0)),
            Metric("output_throughput", 61.23456, "tok/s", "higher"),
        ),
        findings=(Finding("warning", HOSTILE),),
        evidence=("runs/candidate-0.jsonl",),
        details={
            "baseline": {"commit": "0a1b2c3d4e5f6a7b", "engine": "77aa", "recorded": "", "reason": "1.4"},
            "commit": "ffeeddccbbaa9988",
            "runs": "5 pairs of 130 requests",
            "reproduce": "deliver compare --engine 3fa9c1",
            "cases": [
                {"name": "greeting", "status": "fail", "message": HOSTILE},
                {"name": "greeting", "status": "pass"},
            ],
            "charts": [
                charts.distribution("TPOT", "ms", {"baseline": slow, "candidate": [v * 1.2 for v in slow]}),
                charts.pairs("pairs", "ms", [1.0, 2.0], [1.5, 1.9]),
                charts.stack("memory", "bytes", {"baseline": {"weights": 2e8, "peak": 3e7}}),
                charts.bars("perplexity", "ppl", ["en", "zh"], {"a": [1, 2], "b": [2, 3]}, limit=2.5),
                charts.line("trend", "ms", ["1", "2"], {"tpot": [1.0, None]}),
                {"kind": "from the future", "title": "unknown"},
            ],
            "tables": [charts.table("outputs", ["prompt", "seconds"], [[HOSTILE, 1.5]])],
        },
    )


@pytest.fixture
def folder(tmp_path):
    render(failed(), tmp_path)
    return tmp_path


def test_every_rendering_is_written_and_is_deterministic(folder, tmp_path_factory):
    again = tmp_path_factory.mktemp("again")
    render(failed(), again)
    for name in RENDERINGS:
        assert (folder / name).read_bytes() == (again / name).read_bytes()


def test_the_first_screen_answers_the_five_questions():
    top = headline(failed())
    answers = dict(top.answers)
    (worse,) = top.worse
    assert worse.what == "Time per output token, P95"
    assert worse.how_much == "+21.3 %: 9.1 ms against 7.5 ms"
    assert worse.how_sure == "90 % interval +17.0 % to +25.0 %"
    assert worse.limit == "≤ 8.625 ms"
    assert answers["Measured"] == "5 pairs of 130 requests"
    assert top.question == "What got worse"
    assert headline(replace(failed(), verdict=Verdict.INCONCLUSIVE)).question == "What is not clear"
    assert "commit 0a1b2c3d4e5f" in answers["Since"]
    assert "now commit ffeeddccbbaa" in answers["Since"]
    assert top.command == "deliver compare --engine 3fa9c1"


def test_a_failure_without_a_metric_says_what_was_seen():
    report = Report("smoke", "a" * 64, Verdict.INVALID, findings=(Finding("error", "no text came"),))
    assert dict(headline(report).answers) == {"Seen": "no text came."}
    assert headline(replace(report, verdict=Verdict.PASS, findings=())).answers == ()


def test_junit_holds_a_case_per_judged_metric_with_unique_names(folder):
    suite = ET.parse(folder / "junit.xml").getroot()[0]
    cases = {c.get("name"): c for c in suite}
    assert list(cases) == ["verdict", "tpot_p95_ms", "ttft_p95_ms", "greeting", "greeting (2)"]
    assert {c.get("classname") for c in suite} == {"deliver.compare"}
    assert suite.get("failures") == "3"
    assert "limit ≤ 8.625 ms" in cases["tpot_p95_ms"].find("failure").get("message")
    assert cases["ttft_p95_ms"].find("failure") is None


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [(Verdict.INCONCLUSIVE, "error"), (Verdict.INVALID, "error"), (Verdict.WAIVED, "skipped")],
)
def test_junit_tells_errors_and_waivers_from_failures(tmp_path, verdict, kind):
    render(Report("compare", "a" * 64, verdict), tmp_path)
    case = ET.parse(tmp_path / "junit.xml").getroot()[0][0]
    assert case.find(kind) is not None


FROM_OUTSIDE = "\ud800 \x07\x1b[31m </td><script>x</script> $x^2$ https://evil.example www.evil.example @all"


def test_no_text_breaks_a_rendering(tmp_path):
    """Half of a surrogate pair, control characters, links: in every place that holds a text from outside."""
    chart = {
        "kind": "bars",
        "title": FROM_OUTSIDE,
        "unit": FROM_OUTSIDE,
        "categories": [FROM_OUTSIDE],
        "limit": None,
    }
    report = Report(
        "smoke",
        "a" * 64,
        Verdict.FAIL,
        findings=(Finding("error", FROM_OUTSIDE),),
        details={
            "cases": [{"name": FROM_OUTSIDE, "status": "fail", "message": FROM_OUTSIDE}] * 2,
            "facts": {FROM_OUTSIDE: FROM_OUTSIDE},
            "tables": [{"title": FROM_OUTSIDE, "columns": [FROM_OUTSIDE], "rows": [[FROM_OUTSIDE]]}],
            "charts": [{**chart, "series": [{"name": FROM_OUTSIDE, "values": [1.0]}]}],
        },
    )
    report.write(tmp_path)
    render(report, tmp_path)
    assert Report.read(tmp_path).findings[0].text == FROM_OUTSIDE
    assert len({c.get("name") for c in ET.parse(tmp_path / "junit.xml").getroot()[0]}) == 3
    text = (tmp_path / "summary.md").read_text("utf-8")
    assert not re.search(r"<script|https://|www\.|@all|(?<!\\)\$|[\x00-\x08\x1b]", text)
    assert "<script" not in (tmp_path / "report.html").read_text("utf-8")


def test_a_number_that_is_none_is_called_that():
    broken = judge("kl_nats", float("nan"), {"kl_nats": 0.1})
    report = Report("evaluate", "a" * 64, Verdict.FAIL, (replace(broken, baseline=0.2),))
    assert headline(report).worse[0].sentence() == (
        "KL divergence from the source (kl_nats): not finite, limit ≤ 0.1 nats"
    )


def test_openmetrics_is_rounded_and_ends_with_eof(folder):
    text = (folder / "metrics.txt").read_text()
    assert text.endswith("# EOF\n")
    assert "deliver_compare_passed 0" in text
    assert "deliver_compare_output_throughput 61.2\n" in text
    values = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]* -?[0-9.e+-]+", line) for line in values)
    assert len({v.split()[0] for v in values}) == len(values)


def test_the_page_is_self_contained_and_hostile_text_stays_text(folder):
    page = (folder / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"""(src|href)=|url\(|@import|https?://""", page)
    assert page.count("<svg") == 5
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_markdown_does_not_let_text_become_markup(folder):
    text = (folder / "summary.md").read_text()
    assert "<script" not in text
    assert "@all" not in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == 3
    assert all(row.count("|") == 7 for row in rows)
    assert "deliver compare --engine 3fa9c1" in text


def test_markdown_is_cut_before_a_comment_is_refused(tmp_path):
    long = replace(failed(), findings=tuple(Finding("info", "词" * 300) for _ in range(200)))
    render(long, tmp_path)
    data = (tmp_path / "summary.md").read_bytes()
    assert len(data) <= MAX_BYTES
    assert "cut here" in data.decode()


def test_chart_numbers_are_the_ones_drawn(folder):
    numbers = json.loads((folder / "charts.json").read_text())
    first = numbers["charts"][0]
    assert first["series"][0]["mark"] == 16.0
    assert sum(first["series"][0]["shares"]) == pytest.approx(1.0, abs=1e-4)
    assert numbers["tables"][0]["columns"] == ["prompt", "seconds"]


def test_an_empty_report_is_rendered(tmp_path):
    empty = Report("smoke", "a" * 64, Verdict.PASS, details={"charts": [charts.distribution("x", "ms", {})]})
    render(empty, tmp_path)
    assert "Passed" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.00012, "0.00012"), (0.0125, "0.0125"), (123456.7, "123,457"), (-2.5, "-2.5")],
)
def test_numbers_read_well(value, text):
    assert number(value) == text


def test_amounts_carry_their_unit():
    assert amount(100 * 2**20, "bytes") == "100 MiB"
    assert amount(0.987, "ratio") == "98.7 %"
    assert amount(3.0, "ms") == "3 ms"
    assert amount(1.0, "prompts") == "1 prompt"
    assert amount(1.0, "ms") == "1 ms"


@pytest.mark.parametrize(("low", "high", "first"), [(0, 10, 0), (3.3, 3.9, 3.4), (0, 0.001, 0), (-5, 5, -4)])
def test_ticks_are_round_and_inside(low, high, first):
    got = ticks(low, high)
    assert got[0] == pytest.approx(first)
    assert all(low - 1e-9 <= t <= high + 1e-9 for t in got)
    assert 3 <= len(got) <= 8
    assert ticks(2.0, 2.0) == [2.0]


def awkward() -> Report:
    names = ("法律_perplexity", "a_b_perplexity", "a-b_perplexity", "passed", "tpot_p95_ms")
    numbers = (1e300, 1e-7, 123456789.0, -0.5, 9.1)
    return Report(
        "compare-gpu",
        "s" * 64,
        Verdict.INVALID,
        tuple(Metric(n, v, "", "lower") for n, v in zip(names, numbers, strict=True)),
        details={"cases": [{"name": n, "status": "fail"} for n in ("a", "a (2)", "a", "a (2)")]},
    )


def test_openmetrics_is_read_by_prometheus_own_parser_whatever_the_names(tmp_path):
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    render(awkward(), tmp_path)
    text = (tmp_path / "metrics.txt").read_text("utf-8")
    families = list(parser.text_string_to_metric_families(text))
    assert len({f.name for f in families}) == len(families) == 6
    assert families[0].name == "deliver_compare_gpu_passed"
    assert families[0].samples[0].value == 0
    assert [f.samples[0].value for f in families[1:]] == [1e300, 1e-7, 123e6, -0.5, 9.1]
    assert families[1].documentation == "Perplexity (法律)"


def test_no_two_test_cases_have_one_name(tmp_path):
    render(awkward(), tmp_path)
    names = [c.attrib["name"] for c in ET.parse(tmp_path / "junit.xml").iter("testcase")]
    assert names == ["verdict", "a", "a (2)", "a (3)", "a (2) (2)"]


def test_memory_shows_the_limit_on_the_side_that_it_left():
    more = Metric("weights_bytes", 124 * 2**20, "bytes", "both", 105 * 2**20, "fail", 95 * 2**20)
    assert limit(more) == "≤ 105 MiB"
    assert limit(replace(more, value=80 * 2**20, limit=86 * 2**20)) == "≥ 86 MiB"
    assert limit(replace(more, baseline=None)) == "≤ 105 MiB"
    report = replace(failed(), metrics=(more,), details={**failed().details, "facts": FACTS})
    top = headline(report)
    assert top.worse[0].how_sure == "counted, not sampled"
    assert dict(top.answers)["Measured"] == "5 pairs of 130 requests, workload demo, on Test CPU, 2 cores"


def test_a_number_is_not_parted_from_its_unit(folder):
    page = (folder / "report.html").read_text("utf-8")
    assert "9.1\u00a0ms against 7.5\u00a0ms" in page
    assert "≤\u00a08.625\u00a0ms" in page
    assert "+17.0\u00a0% to +25.0\u00a0%" in page


def test_a_pull_request_on_github_is_known_by_its_own_commit(tmp_path, monkeypatch):
    for name in ("CI_COMMIT_SHA", "GITHUB_EVENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GITHUB_SHA", "merge")
    assert current_commit() == "merge"
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"pull_request": {"head": {"sha": "ours"}}}))
    monkeypatch.setenv("GITHUB_EVENT_PATH", str(event))
    assert current_commit() == "merge"
    monkeypatch.setenv("GITHUB_EVENT_NAME", "pull_request")
    assert current_commit() == "ours"
    event.write_text("broken")
    assert current_commit() == "merge"


@pytest.mark.parametrize(
    ("value", "bound", "direction", "told"),
    [
        (0.842, 0.001, "lower", "0.842 nats, 842 times the limit"),
        (0.36, 0.30, "lower", "0.36 nats, 20 % over the limit"),
        (0.60, 0.75, "higher", "0.6 nats, 20 % under the limit"),
        (3.0, 0.0, "lower", "3 nats"),
    ],
)
def test_a_value_without_a_baseline_is_told_by_its_limit(tmp_path, value, bound, direction, told):
    over = Metric("legal_kl_nats", value, "nats", direction, bound, "fail")
    report = replace(failed(), metrics=(over,))
    assert headline(report).worse[0].how_much == told
    render(report, tmp_path)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "By how much" in page
    assert "How sure" not in page  # an empty column answers nothing
