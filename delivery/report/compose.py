"""Parts common to all reports: the commit, the facts, the baseline, the command that reproduces it."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.artifact import canonical_json
from delivery.gate.lookup import Found, Place, find, find_or_make
from delivery.gate.report import FILE_NAME, Report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delivery.artifact import Artifact
    from delivery.gate.baseline import Snapshot

_COMMIT_VARIABLES = ("CI_COMMIT_SHA", "GITHUB_SHA")
_GIT_TIMEOUT_S = 5


def current_commit() -> str:
    """The commit that is being checked: from CI's variables, else from git; "" outside a repository.

    Of a pull request on GitHub that is its newest commit: GITHUB_SHA is there a merge that nobody has made.
    """
    if os.environ.get("GITHUB_EVENT_NAME") == "pull_request":
        with suppress(OSError, ValueError, KeyError, TypeError):
            event = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text("utf-8"))
            return str(event["pull_request"]["head"]["sha"])
    for name in _COMMIT_VARIABLES:
        if value := os.environ.get(name):
            return value
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def commit_of(report: Artifact) -> str:
    """The commit that a report was made at; the current one if it is not recorded."""
    path = report.file(FILE_NAME)
    recorded = Report.read(report.path).details.get("commit") if path.is_file() else ""
    return str(recorded or current_commit())


def measurement_of(report: Artifact) -> str:
    """Digest of the measurement that a report judges; a measurement's own digest."""
    return str(report.manifest.inputs.get("measurement", report.digest))


def command(check: str, inputs: Mapping[str, str], **options: Any) -> str:
    """`deliver CHECK --ROLE DIGEST --OPTION VALUE`, ready to be pasted; empty options are left out."""
    words = ["deliver", check]
    for role, digest in inputs.items():
        words += [f"--{role.replace('_', '-')}", digest[:12]]
    for name, value in options.items():
        for one in value if isinstance(value, list | tuple) else (value,):
            if one not in ("", None):
                words += [f"--{name.replace('_', '-')}", str(one)]
    return shlex.join(words)


def baseline_details(snapshot: Snapshot) -> dict[str, str]:
    """What the headline says about where a comparison starts."""
    return {
        "engine": snapshot.engine,
        "commit": snapshot.commit,
        "recorded": snapshot.recorded,
        "reason": snapshot.reason,
    }


def fact_rows(measured: Mapping[str, Any], **more: Any) -> dict[str, str]:
    """Device, versions and whatever else is worth a line at the foot of the page."""
    device = measured["device"]
    where = device["name"] + (f", {device['cores']} cores" if device.get("cores") else "")
    rows = {"Device": f"{where} ({measured['device_slug']})"}
    rows |= {name: str(value) for name, value in measured["versions"].items()}
    named = {name.replace("_", " ").capitalize(): str(value) for name, value in more.items()}
    # An engine's own setting `device` says less than the device's name.
    return rows | {name: value for name, value in named.items() if name not in rows}


def place(model: str, measured: Mapping[str, Any], workload: Mapping[str, Any]) -> Place:
    """Where the baseline of a measurement belongs; `measured` holds `bench.facts`."""
    return Place(
        model=model,
        device_slug=measured["device_slug"],
        device=measured["device"],
        workload=workload,
        workload_digest=hashlib.sha256(canonical_json(workload).encode()).hexdigest(),
    )


def today() -> str:
    """The day in UTC, ISO 8601: for baselines, never for a report."""
    return datetime.now(UTC).date().isoformat()


def optional_baseline(where: Place, committed: Path, local: Path, snapshot: Snapshot | None) -> Found | None:
    """The baseline of a secondary number. With none, one is made of `snapshot`, or nothing is said.

    The caller records what was made when the check's verdict allows it.
    """
    if snapshot is not None:
        return find_or_make(where, committed, local, snapshot, "bootstrap")
    found = find(where, committed, local)
    return None if found is None else Found(found, made_now=False)
