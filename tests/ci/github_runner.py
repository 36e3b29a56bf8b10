"""A small GitHub on this machine: runs the jobs of a workflow as a server and its runners would.

The well-kept tool for this, `act`, runs every job in a container and needs Docker, which a test cannot
expect; its mode without containers leaves out artifacts and caches. So this does what the workflows of
`deliver ci github` use: triggers with paths, `needs`, `if`, variables at three levels, expressions, the files
behind GITHUB_ENV, GITHUB_OUTPUT, GITHUB_PATH and GITHUB_STEP_SUMMARY, bash as GitHub starts it, and the local
effect of the actions that are used. Every job gets a fresh folder. Anything else is an error, never ignored.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from github_expressions import expand, runs, shown
from gitlab_rules import glob

_JOB = {"name", "needs", "if", "runs-on", "timeout-minutes", "permissions", "steps", "env", "environment"}
_STEP = {"name", "id", "if", "uses", "with", "run", "env", "continue-on-error"}
_FILES = ("GITHUB_ENV", "GITHUB_OUTPUT", "GITHUB_PATH", "GITHUB_STEP_SUMMARY")
REPOSITORY = "org/weights"

Outcome = Literal["success", "failure", "skipped"]


@dataclass
class JobResult:
    """`exit_code` is that of the step that failed; `summary` what stands on the job's page."""

    name: str
    outcome: Outcome
    exit_code: int = 0
    log: str = ""
    summary: str = ""


@dataclass
class Run:
    """One run of a workflow. `artifacts` are what a user can download, by name."""

    jobs: dict[str, JobResult] = field(default_factory=dict)
    artifacts: dict[str, Path] = field(default_factory=dict)


@dataclass
class Server:
    """`repository` is what the jobs check out; `image` are variables that the jobs' machine sets."""

    repository: Path
    home: Path
    image: Mapping[str, str]
    vars: Mapping[str, str] = field(default_factory=dict)
    api: str = "http://127.0.0.1:1"
    token: str = ""

    def push(self, workflow: str, before: str, commit: str, branch: str = "main") -> Run:
        """A push to a branch; no jobs when the workflow does not ask for it."""
        return self._run(workflow, "push", commit, before, f"refs/heads/{branch}", branch, {})

    def pull_request(self, workflow: str, number: int, base: str, head: str) -> Run:
        """A pull request into main. Its jobs see the merge of both, as GitHub's do."""
        tree = self.git("rev-parse", f"{head}^{{tree}}")
        merged = self.git("commit-tree", tree, "-p", base, "-p", head, "-m", f"Merge {head} into {base}")
        event = {"number": number, "pull_request": {"head": {"sha": head}, "base": {"sha": base}}}
        return self._run(workflow, "pull_request", merged, base, f"refs/pull/{number}/merge", "main", event)

    def git(self, *arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=self.repository, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def _run(
        self,
        workflow: str,
        event: str,
        commit: str,
        before: str,
        ref: str,
        branch: str,
        told: Mapping[str, Any],
    ) -> Run:
        made = yaml.safe_load(self.git("show", f"{commit}:{workflow}"))
        on = made[True]  # YAML 1.1 reads the key `on` so
        changed = self.git("diff", "--name-only", before, commit).splitlines()
        if event not in on or not _asked(on[event] or {}, branch, changed):
            return Run()
        self.home.mkdir(exist_ok=True)
        (self.home / "event.json").write_text(json.dumps(told))
        github = {
            "sha": commit,
            "ref": ref,
            "event_name": event,
            "repository": REPOSITORY,
            "server_url": "https://github.example",
            "token": self.token,
            "run_attempt": "1",
        }
        run = Run()
        for name, job in made["jobs"].items():
            if unknown := job.keys() - _JOB - {"concurrency"}:
                raise ValueError(f"{name}: {sorted(unknown)}")
            needs = [run.jobs[need].outcome for need in job.get("needs", [])]
            contexts = {"github": github, "vars": self.vars, "secrets": {}}
            if not runs(job.get("if"), contexts, failed=any(n != "success" for n in needs)):
                run.jobs[name] = JobResult(name, "skipped")
                continue
            place = self.home / "work" / f"{commit[:8]}-{event}-{name}"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            done = _Job(self, run, place, contexts, {**made.get("env", {}), **job.get("env", {})})
            run.jobs[name] = done.result(name, job["steps"])
        return run


class _Job:
    """One job while it runs."""

    def __init__(
        self, server: Server, run: Run, place: Path, contexts: Mapping[str, Any], env: Mapping[str, Any]
    ) -> None:
        self._server, self._run, self._place = server, run, place
        self._github = {**contexts["github"], "workspace": str(place)}
        self._contexts = {**contexts, "github": self._github, "steps": {}}
        self._files = {name: server.home / f"{place.name}.{name}" for name in _FILES}
        for path in self._files.values():
            path.write_text("")
        self._env = {name: expand(value, self._contexts) for name, value in env.items()}

    def result(self, name: str, steps: list[dict[str, Any]]) -> JobResult:
        result = JobResult(name, "success")
        for step in steps:
            if unknown := step.keys() - _STEP:
                raise ValueError(f"a step of {name}: {sorted(unknown)}")
            if not runs(step.get("if"), self._contexts, failed=result.outcome == "failure"):
                continue
            code, log = self._step(step)
            result.log += log
            if code and not step.get("continue-on-error") and result.outcome == "success":
                result.outcome, result.exit_code = "failure", code
        result.summary = self._files["GITHUB_STEP_SUMMARY"].read_text("utf-8")
        shutil.rmtree(self._place)
        return result

    def _step(self, step: Mapping[str, Any]) -> tuple[int, str]:
        own = {name: expand(value, self._contexts) for name, value in step.get("env", {}).items()}
        if "uses" in step:
            action = step["uses"].partition("@")[0]
            told = {name: expand(value, self._contexts) for name, value in step.get("with", {}).items()}
            return self._action(action, told)
        script = self._server.home / f"{self._place.name}.sh"
        script.write_text(expand(step["run"], self._contexts))
        for name in ("GITHUB_OUTPUT",):
            self._files[name].write_text("")
        # Without `shell:` GitHub starts bash like this: no pipefail.
        done = subprocess.run(
            ["bash", "-e", str(script)],
            cwd=self._place,
            env={**self._server.image, **self._defaults(), **self._env, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self._env |= _assignments(self._files["GITHUB_ENV"])
        if "id" in step:
            self._contexts["steps"][step["id"]] = {"outputs": _assignments(self._files["GITHUB_OUTPUT"])}
        return done.returncode, done.stdout

    def _defaults(self) -> dict[str, str]:
        """Variables that GitHub sets in every step."""
        about = {
            f"GITHUB_{name.upper()}": shown(value) for name, value in self._github.items() if name != "token"
        }
        paths = self._files["GITHUB_PATH"].read_text("utf-8").split()
        return {
            **about,
            **{name: str(path) for name, path in self._files.items()},
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_API_URL": self._server.api,
            "GITHUB_EVENT_PATH": str(self._server.home / "event.json"),
            "PATH": ":".join([*reversed(paths), self._server.image["PATH"]]),
        }

    # What the actions do, as far as a job can see it.

    def _action(self, action: str, told: dict[str, str]) -> tuple[int, str]:
        effect = {
            "actions/checkout": self._checkout,
            "actions/setup-python": self._python,
            "actions/cache/restore": self._restore,
            "actions/cache/save": self._save,
            "actions/upload-artifact": self._upload,
            "actions/download-artifact": self._download,
        }.get(action)
        if effect is None:
            raise ValueError(f"no effect is known of {action}")
        return effect(**{name.replace("-", "_"): value for name, value in told.items()})  # type: ignore[operator, no-any-return]

    def _checkout(self, persist_credentials: str, lfs: str = "false") -> tuple[int, str]:
        for command in (
            ["git", "init", "-q"],
            ["git", "fetch", "-q", "--depth", "1", str(self._server.repository), self._github["sha"]],
            ["git", "checkout", "-q", "--detach", "FETCH_HEAD"],
        ):
            subprocess.run(command, cwd=self._place, check=True)
        return 0, ""

    def _python(self, python_version: str) -> tuple[int, str]:
        """The jobs' machine has the Python that runs the tests."""
        return 0, f"Python {python_version}\n"

    def _restore(self, path: str, key: str, restore_keys: str = "") -> tuple[int, str]:
        """A run reads the caches of its own ref and of main, the newest that fits."""
        for ref in (self._github["ref"], "refs/heads/main"):
            folder = self._caches(ref)
            stored = sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime) if folder.is_dir() else []
            hit = [p for p in stored if p.name == key] or [
                p for p in stored if any(p.name.startswith(prefix) for prefix in restore_keys.split())
            ]
            if hit:
                shutil.copytree(hit[-1], self._place, symlinks=True, dirs_exist_ok=True)
                break
        return 0, ""

    def _save(self, path: str, key: str) -> tuple[int, str]:
        """It writes those of its own ref; one that is there is never changed."""
        target = self._caches(self._github["ref"]) / key
        for name in [] if target.is_dir() else path.split():
            if (self._place / name).is_dir():
                shutil.copytree(self._place / name, target / name, symlinks=True)
        return 0, ""

    def _caches(self, ref: str) -> Path:
        return self._server.home / "caches" / ref.replace("/", "_")

    def _upload(
        self,
        name: str,
        path: str,
        include_hidden_files: str = "false",
        if_no_files_found: str = "warn",
        retention_days: str = "",
        compression_level: str = "",
    ) -> tuple[int, str]:
        if name in self._run.artifacts:
            return 1, f"an artifact named {name} is there already\n"
        source = self._place / path
        found = [source] if source.is_file() else [p for p in source.rglob("*") if p.is_file()]
        if include_hidden_files != "true":
            found = [p for p in found if not any(x.startswith(".") for x in p.relative_to(self._place).parts)]
        if not found:
            return int(if_no_files_found == "error"), f"no files found in {path}\n"
        target = self._server.home / "artifacts" / f"{self._place.name}-{name}"
        for file in found:
            to = target / (file.name if source.is_file() else file.relative_to(source))
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, to)
        self._run.artifacts[name] = target
        return 0, ""

    def _download(self, name: str, path: str = "") -> tuple[int, str]:
        if name not in self._run.artifacts:
            return 1, f"there is no artifact named {name}\n"
        shutil.copytree(self._run.artifacts[name], self._place / path, dirs_exist_ok=True)
        return 0, ""


def _asked(trigger: Mapping[str, Any], branch: str, changed: list[str]) -> bool:
    if unknown := trigger.keys() - {"branches", "paths"}:
        raise ValueError(f"on: {sorted(unknown)}")
    patterns = [glob(pattern) for pattern in trigger.get("paths", ["**"])]
    return branch in trigger.get("branches", [branch]) and any(
        p.fullmatch(name) for p in patterns for name in changed
    )


def _assignments(path: Path) -> dict[str, str]:
    """NAME=VALUE lines of a command file."""
    return dict(line.split("=", 1) for line in path.read_text("utf-8").splitlines() if "=" in line)  # type: ignore[misc]
