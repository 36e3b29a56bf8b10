"""A small GitLab on this machine: runs the jobs of a `.gitlab-ci.yml` as a server and its runners would.

What the definitions of `deliver ci gitlab` use: stages and `needs`, `extends`, `rules` with `if` and
`changes`, variables, caches with fall-back keys, artifacts that travel along `needs`, reports that are
collected from failed jobs too, `after_script`, exit codes. Every job gets a fresh clone. Anything else in a
definition is an error, never ignored.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from gitlab_rules import chosen, expand

_GLOBAL = {"stages", "variables", "workflow"}
_IGNORED = {"image", "interruptible", "tags", "environment", "resource_group"}
_KNOWN = _IGNORED | {
    *("extends", "stage", "needs", "rules", "cache", "before_script", "script", "after_script"),
    *("artifacts", "allow_failure", "variables"),
}

Status = Literal["success", "failed", "skipped"]


@dataclass(frozen=True)
class JobResult:
    """`artifacts` holds what a user can download; `reports` kind → file that GitLab itself reads."""

    name: str
    status: Status
    exit_code: int | None = None
    log: str = ""
    artifacts: Path | None = None
    reports: Mapping[str, Path] = field(default_factory=dict)


@dataclass
class Server:
    """`repository` is cloned for every job; `image` are variables that the jobs' machine sets."""

    repository: Path
    home: Path
    image: Mapping[str, str]

    def pipeline(
        self, commit: str, before: str, *, branch: str, source: str = "push", **variables: str
    ) -> dict[str, JobResult]:
        """Run the pipeline of a commit; {} when no rule calls for one. `before`: what changes count from."""
        made = yaml.safe_load(self._git("show", f"{commit}:.gitlab-ci.yml"))
        scope = {
            "CI": "true",
            "GITLAB_CI": "true",
            "CI_COMMIT_SHA": commit,
            "CI_COMMIT_REF_SLUG": branch.replace("/", "-"),
            "CI_DEFAULT_BRANCH": "main",
            "CI_PIPELINE_SOURCE": source,
            "CI_PROJECT_URL": "https://gitlab.example/weights",
            **({"CI_COMMIT_BRANCH": branch} if source != "merge_request_event" else {}),
            **variables,
        }
        scope = {**{k: str(v) for k, v in made.get("variables", {}).items()}, **scope}
        changed = self._git("diff", "--name-only", before, commit).splitlines()
        workflow = made.get("workflow", {}).get("rules")
        if workflow is not None and chosen(workflow, scope, changed) is None:
            return {}
        jobs = {
            name: _extended(made, name) for name in made if name not in _GLOBAL and not name.startswith(".")
        }
        jobs = {
            name: job
            for name, job in jobs.items()
            if "rules" not in job or chosen(job["rules"], scope, changed)
        }
        done: dict[str, JobResult] = {}
        for name in sorted(jobs, key=lambda n: made["stages"].index(jobs[n]["stage"])):
            done[name] = self._job(name, jobs[name], scope, done)
        return done

    def _job(
        self, name: str, job: Mapping[str, Any], scope: Mapping[str, str], done: Mapping[str, JobResult]
    ) -> JobResult:
        needs = [done[need] for need in job["needs"]]
        if any(need.status != "success" for need in needs):
            return JobResult(name, "skipped")
        place = self.home / "builds" / f"{scope['CI_COMMIT_SHA'][:8]}-{scope['CI_PIPELINE_SOURCE']}-{name}"
        shutil.rmtree(place, ignore_errors=True)
        self._git("clone", "-q", str(self.repository), str(place))
        subprocess.run(["git", "checkout", "-q", scope["CI_COMMIT_SHA"]], cwd=place, check=True)
        caches = job.get("cache", [])
        for cache in caches:
            self._restore(cache, scope, place)
        for need in needs:
            if need.artifacts is not None:
                _unpack(need.artifacts, place)
        told = {**scope, "CI_PROJECT_DIR": str(place), "CI_JOB_NAME": name}
        told |= {key: expand(value, told) for key, value in told.items()}
        code, log = self._shell([*job.get("before_script", []), *job["script"]], told, place)
        if "after_script" in job:
            log += self._shell(job["after_script"], told, place)[1]
        status: Status = "success" if code == 0 or job.get("allow_failure") is True else "failed"
        for cache in caches:
            if status == "success" or cache.get("when") == "always":
                _copy(place, self._cache(cache["key"], scope), cache["paths"])
        return self._kept(JobResult(name, status, code, log), job.get("artifacts", {}), place)

    def _shell(self, lines: Sequence[str], told: Mapping[str, str], place: Path) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", "\n".join(lines)],
            cwd=place,
            env={**self.image, **told},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def _kept(self, job: JobResult, artifacts: Mapping[str, Any], place: Path) -> JobResult:
        """Artifacts by `when`; reports whatever the outcome."""
        if unknown := artifacts.keys() - {"when", "expire_in", "paths", "reports"}:
            raise ValueError(f"artifacts of {job.name}: {sorted(unknown)}")
        folder = self.home / "artifacts" / place.name
        when = artifacts.get("when", "on_success")
        if when == "always" or (when == "on_success") is (job.status == "success"):
            _copy(place, folder, artifacts.get("paths", []))
        reports = {}
        for kind, name in artifacts.get("reports", {}).items():
            if (place / name).is_file():
                reports[kind] = self.home / "reports" / place.name / Path(name).name
                reports[kind].parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(place / name, reports[kind])
        shutil.rmtree(place)
        return JobResult(
            job.name, job.status, job.exit_code, job.log, folder if folder.is_dir() else None, reports
        )

    def _cache(self, key: str, scope: Mapping[str, str]) -> Path:
        return self.home / "caches" / expand(key, scope)

    def _restore(self, cache: Mapping[str, Any], scope: Mapping[str, str], place: Path) -> None:
        for key in (cache["key"], *cache.get("fallback_keys", ())):
            if (stored := self._cache(key, scope)).is_dir():
                _unpack(stored, place)
                return

    def _git(self, *arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=self.repository, capture_output=True, text=True, check=True).stdout


def _extended(made: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A job with what it extends merged in: mappings key by key, anything else replaced."""
    job = dict(made[name])
    if unknown := job.keys() - _KNOWN:
        raise ValueError(f"{name}: {sorted(unknown)}")
    base = job.pop("extends", None)
    return job if base is None else _merged(_extended(made, base), job)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if both else value
    return out


def _unpack(stored: Path, place: Path) -> None:
    """Copy a tree over another one; symbolic links stay links, and no file is written through."""
    for folder, names, files in os.walk(stored):
        to = place / Path(folder).relative_to(stored)
        to.mkdir(parents=True, exist_ok=True)
        for name in [*files, *(n for n in names if (Path(folder) / n).is_symlink())]:
            (to / name).unlink(missing_ok=True)
            shutil.copy2(Path(folder) / name, to / name, follow_symlinks=False)


def _copy(source: Path, target: Path, paths: Sequence[str]) -> None:
    """Files and folders by name; what is not there is left out, as GitLab warns and goes on."""
    for name in paths:
        path = source / name
        if path.is_dir():
            _unpack(path, target / name)
        elif path.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name)
