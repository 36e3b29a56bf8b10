"""From a weight commit to a verdict, as a user of GitHub sees it.

A repository with a tiny model gets its workflow from `deliver ci github`; a local runner does its jobs. Its
history: good weights, for which there is no baseline; their numbers accepted from the failed run's artifact;
a pull request whose model is 30 % slower. Two minutes of a core, more where it is shared.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
import review_servers
import taught_checkpoint
import tiny_checkpoint
import yaml
from github_expressions import evaluate, expand, runs
from github_runner import Run, Server
from weights_repository import BIN, Repository, environment

# The first test waits for the whole history; on a machine that others use, that takes its time.
pytestmark = pytest.mark.timeout(1200)

FILE = "pipelines/release.yaml"
WORKFLOW = ".github/workflows/deliver.yml"
PIPELINE = """
version: 1
model: ./model
defaults: {device: cpu}
steps:
  - uses: convert
  - uses: quantize
    with: {scheme: w8a16}
  - uses: build
  - uses: compare
    # Others may work on this machine meanwhile.
    with: {workload: load.json, foreign_limit: 1.0}
  - uses: package
    with: {require: [compare]}
"""
LOAD = {
    "requests": 130,
    "warmup": 8,
    "shape": {"kind": "fixed", "prompt_tokens": 8, "output_tokens": 10},
    "arrival": {"kind": "closed", "concurrency": 16},
}
STAGES = ["convert", "quantize", "build", "compare", "package"]


@dataclass(frozen=True)
class History:
    """The runs of the three commits and of a commit without weights, and the pull request's comments."""

    first: Run
    accepted: Run
    slower: Run
    docs_only: Run
    comments: list[str]
    good: str
    slow: str


def founded(folder: Path) -> Repository:
    folder.mkdir()
    tiny_checkpoint.write(folder / "model")
    (folder / "pipelines").mkdir()
    (folder / FILE).write_text(PIPELINE)
    (folder / "load.json").write_text(json.dumps(LOAD))
    (folder / ".gitignore").write_text(".deliver/\n.cache/\nrelease/\nworkdir.tar\n")
    command = [BIN / "deliver", "ci", "github", FILE, "--install", "deliver --version"]
    made = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=True)
    (folder / WORKFLOW).parent.mkdir(parents=True)
    (folder / WORKFLOW).write_text(made.stdout)
    repository = Repository(folder)
    repository.git("init", "-q", "--initial-branch", "main")
    repository.git("config", "user.name", "Ann")
    repository.git("config", "user.email", "ann@example.org")
    repository.git("config", "uploadpack.allowAnySHA1InWant", "true")
    return repository


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    home = tmp_path_factory.mktemp("github")
    repository = founded(home / "weights")
    empty = repository.git("hash-object", "-t", "tree", "/dev/null")
    with review_servers.github() as (review, variables):
        server = Server(
            repository.path,
            home / "server",
            environment(),
            api=variables["GITHUB_API_URL"],
            token=variables["DELIVER_COMMENT_TOKEN"],
        )
        good = repository.commit("Weights")
        first = server.push(WORKFLOW, empty, good)

        # What the documentation says to do with a first measurement: take it from the run, accept it.
        (repository.path / ".deliver").mkdir()
        with tarfile.open(first.artifacts["workdir-compare"] / "workdir.tar") as kept:
            kept.extractall(repository.path / ".deliver", filter="data")
        update = [BIN / "deliver", "baseline", "update", "--reason", "first weights", "--pipeline", FILE]
        subprocess.run(update, cwd=repository.path, env=environment(), check=True)
        shutil.rmtree(repository.path / ".deliver")
        base = repository.commit("Baseline of the first weights")
        accepted = server.push(WORKFLOW, good, base)

        repository.git("checkout", "-q", "-b", "more-heads", "main")
        taught_checkpoint.change_config(repository.path / "model", planted_step_ms=15.6)
        slow = repository.commit("Slower weights")
        slower = server.pull_request(WORKFLOW, 7, base, slow)
        comments = list(review.comments.values())
        repository.git("checkout", "-q", "main")
        (repository.path / "README.md").write_text("Weights.\n")
        docs_only = server.push(WORKFLOW, base, repository.commit("Read me"))
    yield History(first, accepted, slower, docs_only, comments, good, slow)
    shutil.rmtree(home, ignore_errors=True)


def outcomes(run: Run) -> dict[str, str]:
    return {name: job.outcome for name, job in run.jobs.items()}


def expected(failed: str) -> dict[str, str]:
    at = STAGES.index(failed)
    found = {n: "success" if i < at else "failure" if i == at else "skipped" for i, n in enumerate(STAGES)}
    return {**found, "deploy": "skipped"}


@pytest.mark.slow
def test_the_first_weights_have_no_baseline_and_the_summary_says_so(history: History) -> None:
    compare = history.first.jobs["compare"]
    assert outcomes(history.first) == expected("compare"), compare.log
    assert compare.exit_code == 5
    assert "error[baseline-missing]" in compare.log
    assert "no baseline of model" in compare.summary
    assert "release" not in history.first.artifacts


@pytest.mark.slow
def test_with_an_accepted_baseline_the_same_weights_are_released_without_new_work(history: History) -> None:
    jobs = history.accepted.jobs
    assert outcomes(history.accepted) == {**dict.fromkeys(STAGES, "success"), "deploy": "skipped"}, [
        jobs[name].log for name in ("compare", "package")
    ]
    for name in STAGES[:-1]:
        assert "cached" in jobs[name].log, jobs[name].log
    assert "✅ pass" in jobs["compare"].summary
    release = history.accepted.artifacts["release"]
    assert list(release.glob("*.tgz"))
    assert (release / "SHA256SUMS").is_file()


@pytest.mark.slow
def test_slower_weights_fail_and_the_summary_the_reports_and_the_comment_say_why(history: History) -> None:
    compare = history.slower.jobs["compare"]
    assert outcomes(history.slower) == expected("compare"), compare.log
    assert compare.exit_code == 3
    assert "error[gate-failed]: compare rejected" in compare.log
    assert "❌ fail" in compare.summary
    assert "Time per output token, P95" in compare.summary
    assert f"Since: commit {history.good[:12]}" in compare.summary
    assert f"now commit {history.slow[:12]}" in compare.summary  # not the merge that GitHub made up
    report = history.slower.artifacts["report-compare"]
    cases = ElementTree.parse(report / "junit.xml").getroot().iter("testcase")
    assert "tpot_p95_ms" in {c.attrib["name"] for c in cases if c.find("failure") is not None}
    assert (report / "metrics.txt").read_text("utf-8").endswith("# EOF\n")
    assert history.good[:12] in (report / "report.html").read_text("utf-8")
    (comment,) = history.comments
    assert comment.startswith(f"<!-- deliver: {FILE} -->\n## ❌ fail")
    assert history.slow[:12] in comment
    assert "comment made: compare fail" in compare.log


@pytest.mark.slow
def test_a_commit_without_weights_starts_nothing(history: History) -> None:
    assert history.docs_only.jobs == {}


def test_expressions_of_the_runner() -> None:
    told = {"github": {"ref": "refs/heads/main", "event_name": "push", "sha": "abc"}, "vars": {"A": "x"}}
    assert evaluate("github.ref == 'refs/heads/main' && github.event_name != 'pull_request'", told) is True
    assert expand("key-${{ github.sha }} ${{ vars.B || 'y' }} ${{ vars.A || 'y' }}", told) == "key-abc y x"
    assert (
        expand("${{ vars.B }}|${{ !vars.B }}|${{ 'it''s' }}|${{ ('' || false) }}", told) == "|true|it's|false"
    )
    assert runs("always() && github.event_name == 'push'", told, failed=True)
    assert not runs("github.event_name == 'push'", told, failed=True)
    assert not runs(None, told, failed=True)
    assert runs("${{ failure() }}", told, failed=True)
    with pytest.raises(ValueError, match="cannot read"):
        evaluate("github.sha ? 1", told)
    with pytest.raises(ValueError, match="goes on"):
        evaluate("'a' 'b'", told)


def test_the_runner_honours_github_s_files_and_starts_bash_as_github_does(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "repo")
    repository.path.mkdir()
    steps = [
        {"uses": "actions/checkout@v6", "with": {"persist-credentials": False}},
        {"run": 'echo "WHO=Ann" >> "$GITHUB_ENV"; mkdir bin; echo "$PWD/bin" >> "$GITHUB_PATH"'},
        {"run": "printf '#!/bin/sh\\necho hello $1\\n' > bin/greet; chmod +x bin/greet"},
        {"id": "said", "run": 'echo "text=$(greet $WHO)" >> "$GITHUB_OUTPUT"; false | true'},
        {"run": 'echo "${{ steps.said.outputs.text }}, $GITHUB_EVENT_NAME" >> "$GITHUB_STEP_SUMMARY"'},
        {"run": "exit 7", "continue-on-error": True},
        {"run": "exit 5"},
        {"run": 'echo "not this" >> "$GITHUB_STEP_SUMMARY"'},
        {"if": "always()", "run": 'echo "but this" >> "$GITHUB_STEP_SUMMARY"'},
    ]
    jobs = {
        "one": {"runs-on": "x", "steps": steps},
        "two": {"runs-on": "x", "needs": ["one"], "steps": steps},
    }
    (repository.path / "w.yml").write_text(
        yaml.safe_dump({True: {"push": {"paths": ["*.yml"]}}, "jobs": jobs})
    )
    repository.git("init", "-q", "--initial-branch", "main")
    for key, value in (
        ("user.name", "Ann"),
        ("user.email", "a@b.org"),
        ("uploadpack.allowAnySHA1InWant", "true"),
    ):
        repository.git("config", key, value)
    commit = repository.commit("One")
    server = Server(repository.path, tmp_path / "home", environment())
    empty = repository.git("hash-object", "-t", "tree", "/dev/null")
    run = server.push("w.yml", empty, commit)
    assert run.jobs["one"].exit_code == 5
    assert run.jobs["one"].summary == "hello Ann, push\nbut this\n"
    assert run.jobs["two"].outcome == "skipped"


def test_the_runner_knows_every_key_and_action_of_this_repositorys_workflow() -> None:
    from github_runner import _JOB, _STEP

    made = yaml.safe_load(Path(WORKFLOW).read_text("utf-8"))
    for name, job in made["jobs"].items():
        assert job.keys() <= _JOB | {"concurrency"}, name
        assert all(step.keys() <= _STEP for step in job["steps"]), name
