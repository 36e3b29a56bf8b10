"""The comment on a merge request, against servers that keep state like GitLab and GitHub do."""

from __future__ import annotations

import os

import pytest
import review_servers

from delivery.cli import main
from delivery.errors import EnvironmentLacking
from delivery.gate.report import Finding, Metric, Report, Verdict
from delivery.pipeline.publish import RENDERINGS
from delivery.report import render
from delivery.report.comment import NoThread, Thread, marker, reports_of, text_of, thread_of

COMMIT = "a" * 40
PIPELINE = """
version: 1
model: demo
steps:
  - uses: convert
  - uses: calibrate
  - uses: quantize
  - uses: build
  - uses: smoke
  - uses: evaluate
  - uses: compare
"""
SYSTEMS = {"gitlab": review_servers.gitlab, "github": review_servers.github}


def report(check, verdict=Verdict.PASS, commit=COMMIT, value=9.1):
    status = verdict.value if verdict is not Verdict.BOOTSTRAPPED else "shown"
    tpot = Metric("tpot_p95_ms", value, "ms", "lower", limit=8.6, status=status, baseline=7.5)
    found = [Finding("error", "a model's <b>hostile</b> output @all")] if verdict is Verdict.FAIL else []
    return Report(
        check, "e" * 64, verdict, metrics=(tpot,), findings=tuple(found), details={"commit": commit}
    )


def publish(folder, *reports):
    for each in reports:
        path = folder / ".deliver" / "reports" / each.check
        path.mkdir(parents=True, exist_ok=True)
        each.write(path)
        render(each, path)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("CI", "GITLAB_", "GITHUB_", "DELIVER_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CI_COMMIT_SHA", COMMIT)
    monkeypatch.setenv("GITHUB_SHA", COMMIT)
    (tmp_path / "p.yaml").write_text(PIPELINE)
    return tmp_path


@pytest.fixture(params=list(SYSTEMS))
def review(request, here, monkeypatch):
    with SYSTEMS[request.param]() as (server, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield server


def test_one_comment_is_made_and_then_changed(review, here, capsys):
    publish(here, report("smoke"))
    assert main(["ci", "comment", "p.yaml"]) == 0
    assert capsys.readouterr().out == "comment made: smoke pass\n"
    publish(here, report("compare", Verdict.FAIL))
    assert main(["ci", "comment", "p.yaml"]) == 0
    assert capsys.readouterr().out == "comment changed: smoke pass, compare fail\n"
    assert main(["ci", "comment", "p.yaml"]) == 0
    assert capsys.readouterr().out == "comment left as it is: smoke pass, compare fail\n"
    (body,) = review.comments.values()
    assert body.startswith("<!-- deliver: p.yaml -->\n## ❌ fail · delivery at `aaaaaaaaaaaa`")
    assert body.index("compare of eeee") < body.index("<details><summary>✅ pass · smoke of eeee")
    assert "<b>" not in body
    assert "@all" not in body
    assert len(review.wrote()) == 2


def test_a_comment_of_somebody_else_or_of_another_pipeline_is_left_alone(review, here):
    others = {i: f"nice work, number {i}" for i in range(1, 251)}
    others[3] = "<!-- deliver: other.yaml -->\nof another pipeline"
    others[4] = f"> {marker('p.yaml')}\nI quote it"
    review.comments |= others
    publish(here, report("smoke"))
    assert main(["ci", "comment", "p.yaml"]) == 0
    publish(here, report("smoke", value=9.2))
    assert main(["ci", "comment", "p.yaml"]) == 0
    assert {i: body for i, body in review.comments.items() if i <= 250} == others
    assert list(review.comments) == list(range(1, 252))
    assert "9.2 ms" in review.comments[251]


def test_without_a_token_nothing_is_asked(review, here, monkeypatch, capsys):
    publish(here, report("smoke"))
    monkeypatch.delenv("DELIVER_COMMENT_TOKEN")
    assert main(["ci", "comment", "p.yaml"]) == 0
    assert capsys.readouterr().out == "no comment: DELIVER_COMMENT_TOKEN is not set\n"
    assert review.log == []


def test_without_reports_of_this_commit_nothing_is_posted(review, here, capsys):
    publish(here, report("smoke", commit="b" * 40))
    assert main(["ci", "comment", "p.yaml"]) == 0
    assert "no report of this commit" in capsys.readouterr().out
    assert review.log == []


@pytest.mark.parametrize("status", [302, 403, 404, 500])
def test_a_refusal_is_told_without_the_token(review, here, capsys, status):
    publish(here, report("smoke"))
    review.broken = status
    assert main(["ci", "comment", "p.yaml"]) == 6
    err = capsys.readouterr().err
    assert "error[comment-refused]" in err
    assert f"status {status}" in err
    assert review_servers.TOKEN not in err


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({}, "not a GitLab or GitHub job"),
        ({"GITLAB_CI": "true", "DELIVER_COMMENT_TOKEN": "x"}, "no merge request"),
        ({"GITHUB_ACTIONS": "true", "GITHUB_REF": "refs/heads/main"}, "no merge request"),
        ({"GITLAB_CI": "true", "CI_MERGE_REQUEST_IID": "7", "DELIVER_COMMENT_TOKEN": " "}, "is not set"),
    ],
)
def test_where_there_is_nothing_to_comment_on(variables, reason):
    found = thread_of(variables)
    assert isinstance(found, NoThread)
    assert reason in found.reason


def test_a_server_that_is_not_there_is_named():
    thread = Thread("http://127.0.0.1:9/notes", "http://127.0.0.1:9/notes/{}", {}, "PUT")
    with pytest.raises(EnvironmentLacking, match=r"127\.0\.0\.1:9/notes"):
        thread.post("<!-- m -->", "text")


def test_a_long_comment_fits_what_github_takes():
    many = [report("smoke", Verdict.FAIL) for _ in range(3)]
    told = tuple(Finding("error", "word " * 2000) for _ in range(9))
    long = [Report(r.check, r.subject, r.verdict, r.metrics, told, details=r.details) for r in many]
    text = text_of(long, COMMIT)
    assert len(text) < 65_000
    assert text.endswith("… cut here; the whole is in report.html\n")


def test_reports_come_in_the_order_of_the_stages(here):
    publish(here, report("compare"), report("smoke"))
    found = reports_of(here / ".deliver" / "reports", ["smoke", "evaluate", "compare"], "")
    assert [r.check for r in found] == ["smoke", "compare"]
    assert set(RENDERINGS) >= {"summary.md"}
