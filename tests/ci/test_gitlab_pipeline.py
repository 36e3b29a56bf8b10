"""From a weight commit to a verdict, as a user of GitLab sees it.

A repository with a model gets its `.gitlab-ci.yml` from `deliver ci gitlab`; a local runner does its jobs.
Its history: good weights; their numbers accepted as the baseline; a merge request whose model is 30 %
slower; a merge request whose `rope_theta` is wrong. Three minutes of a core, more where it is shared.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
import review_servers
import taught_checkpoint
import yaml
from gitlab_rules import glob, holds
from gitlab_runner import JobResult, Server
from weights_repository import BIN, Repository, environment

from delivery.gate.report import Report

# The first test waits for the whole history; on a machine that others use, that takes its time.
pytestmark = pytest.mark.timeout(1800)

FILE = "pipelines/release.yaml"
PIPELINE = """
version: 1
model: ./model
defaults: {device: cpu}
steps:
  - uses: convert
  - uses: quantize
    with: {scheme: w8a16}
  - uses: build
  - uses: smoke
    # Its coarse alarm would ring for 30 % too; here compare is to judge.
    with: {suites: [smoke/learnt.json], runs: 4, limit: 2.0}
  - uses: evaluate
    with: {corpus: corpus.txt, windows: 1, window_tokens: 64}
  - uses: compare
    # Others may work on this machine meanwhile.
    with: {workload: load.json, foreign_limit: 1.0}
  - uses: package
gate:
  limits: {smoke_perplexity: 1.5}
"""
LOAD = {
    "requests": 130,
    "warmup": 8,
    "shape": {"kind": "fixed", "prompt_tokens": 8, "output_tokens": 16},
    "arrival": {"kind": "closed", "concurrency": 8},
}
STAGES = ["convert", "quantize", "build", "smoke", "evaluate", "compare", "package"]

Jobs = dict[str, JobResult]


@dataclass(frozen=True)
class History:
    """The pipelines of the four commits, and what was commented on the two merge requests."""

    first: Jobs
    accepted: Jobs
    slower: Jobs
    broken: Jobs
    docs_only: Jobs
    comments: dict[str, list[str]]
    commits: dict[str, str]


def found(folder: Path) -> Repository:
    """A new repository with a model, its pipeline, its suite, and the CI definition made for them."""
    folder.mkdir()
    taught_checkpoint.write(folder / "model")
    (folder / "pipelines").mkdir()
    (folder / FILE).write_text(PIPELINE)
    (folder / "smoke").mkdir()
    (folder / "smoke" / "learnt.json").write_text(json.dumps(taught_checkpoint.suite()))
    (folder / "corpus.txt").write_text("\n\n".join([taught_checkpoint.TEXT] * 40))
    (folder / "load.json").write_text(json.dumps(LOAD))
    (folder / ".gitignore").write_text(".deliver/\n.cache/\nrelease/\n")
    command = [BIN / "deliver", "ci", "gitlab", FILE, "--install", "deliver --version"]
    made = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=True)
    (folder / ".gitlab-ci.yml").write_text(made.stdout)
    repository = Repository(folder)
    repository.git("init", "-q", "--initial-branch", "main")
    repository.git("config", "user.name", "Ann")
    repository.git("config", "user.email", "ann@example.org")
    return repository


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    home = tmp_path_factory.mktemp("gitlab")
    repository = found(home / "weights")
    server = Server(repository.path, home, environment())
    empty = repository.git("hash-object", "-t", "tree", "/dev/null")

    good = repository.commit("Weights")
    first = server.pipeline(good, empty, branch="main")

    # What the documentation says to do with a first measurement: take it from the job, accept it.
    shutil.copytree(first["compare"].artifacts or "", repository.path, symlinks=True, dirs_exist_ok=True)
    update = [BIN / "deliver", "baseline", "update", "--reason", "first weights", "--pipeline", FILE]
    subprocess.run(update, cwd=repository.path, env=environment(), check=True)
    shutil.rmtree(repository.path / ".deliver")
    base = repository.commit("Baseline of the first weights")
    accepted = server.pipeline(base, good, branch="main")

    comments = {}
    with review_servers.gitlab() as (review, variables):

        def merge_request(branch: str, message: str, **config: object) -> tuple[str, Jobs]:
            repository.git("checkout", "-q", "-b", branch, "main")
            taught_checkpoint.change_config(repository.path / "model", **config)
            commit = repository.commit(message)
            review.comments.clear()
            jobs = server.pipeline(commit, base, branch=branch, source="merge_request_event", **variables)
            comments[branch] = list(review.comments.values())
            repository.git("checkout", "-q", "main")
            return commit, jobs

        slow, slower = merge_request("more-heads", "Slower weights", planted_step_ms=15.6)
        wrong, broken = merge_request("long-context", "Longer context", rope_theta=500.0)
    (repository.path / "README.md").write_text("Weights.\n")
    docs_only = server.pipeline(repository.commit("Read me"), base, branch="main")
    commits = {"good": good, "base": base, "slow": slow, "wrong": wrong}
    yield History(first, accepted, slower, broken, docs_only, comments, commits)
    shutil.rmtree(home, ignore_errors=True)


def outcomes(jobs: Jobs) -> dict[str, str]:
    return {name: job.status for name, job in jobs.items()}


def expected(failed: str) -> dict[str, str]:
    at = STAGES.index(failed)
    return {
        name: "success" if i < at else "failed" if i == at else "skipped" for i, name in enumerate(STAGES)
    }


def report(jobs: Jobs, check: str) -> Report:
    """The report that a user finds among the job's artifacts."""
    folder = jobs[check].artifacts
    assert folder is not None
    return Report.read(folder / ".deliver" / "reports" / check)


def page(jobs: Jobs, check: str) -> str:
    folder = jobs[check].artifacts
    assert folder is not None
    return (folder / ".deliver" / "reports" / check / "report.html").read_text("utf-8")


def failures(job: JobResult) -> dict[str, str]:
    """Failed cases of the JUnit report that GitLab shows in the merge request."""
    cases = ElementTree.parse(job.reports["junit"]).getroot().iter("testcase")
    return {c.attrib["name"]: c[0].attrib["message"] for c in cases if c.find("failure") is not None}


@pytest.mark.slow
def test_the_first_weights_have_no_baseline_and_ci_says_so(history: History) -> None:
    assert outcomes(history.first) == expected("compare"), history.first["compare"].log
    assert history.first["compare"].exit_code == 5
    assert "error[baseline-missing]" in history.first["compare"].log
    assert "deliver baseline update --reason" in history.first["compare"].log
    assert "no comment: this job belongs to no merge request" in history.first["smoke"].log


@pytest.mark.slow
def test_with_an_accepted_baseline_the_same_weights_are_released_without_new_work(history: History) -> None:
    assert outcomes(history.accepted) == dict.fromkeys(STAGES, "success"), history.accepted
    for name in STAGES[:-1]:
        assert "cached" in history.accepted[name].log, history.accepted[name].log
    release = history.accepted["package"].artifacts
    assert release is not None
    assert list((release / "release").glob("*.tgz"))
    assert (release / "release" / "SHA256SUMS").is_file()
    assert report(history.accepted, "compare").verdict == "pass"


@pytest.mark.slow
def test_slower_weights_fail_in_compare_and_everywhere_it_is_said_why(history: History) -> None:
    assert outcomes(history.slower) == expected("compare"), history.slower["compare"].log
    compare = history.slower["compare"]
    assert compare.exit_code == 3
    assert "error[gate-failed]: compare rejected" in compare.log
    assert {"tpot_p95_ms", "e2e_p95_ms"} <= set(failures(compare))
    found = report(history.slower, "compare")
    tpot = next(m for m in found.metrics if m.name == "tpot_p95_ms")
    assert tpot.baseline is not None
    assert 1.15 < tpot.value / tpot.baseline < 1.5
    assert re.fullmatch(r"(5|8|12) pairs of 130 requests", found.details["runs"])  # beside the old engine
    assert found.details["baseline"]["commit"] == history.commits["good"]
    assert found.details["commit"] == history.commits["slow"]
    metrics = compare.reports["metrics"].read_text("utf-8")
    assert metrics.endswith("# EOF\n")
    assert re.search(r"^deliver_compare_tpot_p95_ms [0-9.]+$", metrics, re.MULTILINE)
    html = page(history.slower, "compare")
    for words in ("Time per output token", history.commits["good"][:12], "deliver compare --engine"):
        assert words in html


@pytest.mark.slow
def test_a_wrong_rope_theta_fails_in_smoke_though_the_source_agrees_with_itself(history: History) -> None:
    assert outcomes(history.broken) == expected("smoke"), history.broken["smoke"].log
    smoke = history.broken["smoke"]
    assert smoke.exit_code == 3
    assert {"smoke_perplexity", "smoke_failed_prompts"} <= set(failures(smoke))
    found = {m.name: m for m in report(history.broken, "smoke").metrics}
    assert found["smoke_perplexity"].value > 2
    assert (
        found["smoke_greedy_agreement_ratio"].status == "pass"
        if found.get("smoke_greedy_agreement_ratio")
        else True
    )


@pytest.mark.slow
def test_each_merge_request_has_one_comment_with_all_its_checks(history: History) -> None:
    (slow,) = history.comments["more-heads"]
    assert slow.startswith(f"<!-- deliver: {FILE} -->\n## ❌ fail")
    assert history.commits["slow"][:12] in slow
    assert slow.index("compare of") < slow.index("smoke of")
    assert "deliver compare --engine" in slow
    assert "comment made: smoke pass" in history.slower["smoke"].log
    assert "comment changed: smoke pass, evaluate pass, compare fail" in history.slower["compare"].log
    (broken,) = history.comments["long-context"]
    assert "smoke of" in broken
    assert "compare of" not in broken


@pytest.mark.slow
def test_a_commit_without_weights_starts_nothing(history: History) -> None:
    assert history.docs_only == {}


def test_rules_and_globs_of_the_runner() -> None:
    told = {"A": "web", "B": "main", "C": "main"}
    assert holds('$A == "web" && $B == $C', told)
    assert not holds('$A == "push" || $D', told)
    assert holds("$A =~ /^(web|api)$/ && $A != null && !($D)".replace("!($D)", "$D == null"), told)
    assert holds('($A == "x" || $B) && $C', told)
    with pytest.raises(ValueError, match="cannot read"):
        holds("$A ? 1", told)
    assert glob("**/*.safetensors").fullmatch("model/a.safetensors")
    assert glob("**/*.safetensors").fullmatch("a.safetensors")
    assert glob("model/**").fullmatch("model/a/b.json")
    assert not glob("*.json").fullmatch("a/b.json")


def test_the_runner_knows_every_key_of_this_repositorys_definition() -> None:
    from gitlab_runner import _extended

    made = yaml.safe_load(Path(".gitlab-ci.yml").read_text("utf-8"))
    for name in made["stages"]:
        assert _extended(made, name)["stage"] == name
