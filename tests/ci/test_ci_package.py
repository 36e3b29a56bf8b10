"""What CI jobs install: this version from an index, this build from elsewhere, or what a variable names."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from github_expressions import expand

from delivery import __version__
from delivery.cli import main
from delivery.cli._ci import own_package

PUBLISHED = f"deliver[demo]=={__version__}"
GIT = "deliver[demo] @ git+https://git.example.org/ml/deliver.git@4f1c"
WHEEL_URL = "deliver[demo] @ https://files.example.org/deliver-0.1.0-py3-none-any.whl"
WHEEL_FILE = "./wheels/deliver-0.1.0-py3-none-any.whl[demo]"

# PEP 610 → the requirement.
ORIGINS = [
    (None, None),
    ({"url": "file:///home/ann/deliver", "dir_info": {"editable": True}}, None),
    ({"url": "file:///tmp/deliver.whl", "archive_info": {}}, None),
    ({"url": "https://git.example.org/ml/deliver.git", "vcs_info": {"vcs": "git", "commit_id": "4f1c"}}, GIT),
    ({"url": WHEEL_URL.partition(" @ ")[2], "archive_info": {}}, WHEEL_URL),
    (
        {
            "url": "https://ann:secret@git.example.org/ml/deliver.git",
            "vcs_info": {"vcs": "git", "commit_id": "4f1c"},
        },
        GIT,
    ),
    (
        {"url": "ssh://git@git.example.org/deliver.git", "vcs_info": {"vcs": "git", "commit_id": "4f1c"}},
        "deliver[demo] @ git+ssh://git@git.example.org/deliver.git@4f1c",
    ),
    (
        {"url": WHEEL_URL.partition(" @ ")[2], "archive_info": {"hashes": {"sha256": "ab"}}},
        f"{WHEEL_URL}#sha256=ab",
    ),
]


def installed_from(monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None) -> None:
    """Make this build look as if an installer had recorded that origin."""
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(metadata.Distribution, "read_text", lambda self, name: text, raising=False)
    monkeypatch.setattr(metadata.PathDistribution, "read_text", lambda self, name: text)


def printed(capsys: pytest.CaptureFixture[str], system: str, *options: str) -> tuple[dict[Any, Any], str]:
    """A CI definition and what was said beside it."""
    assert main(["ci", system, "pipelines/default.yaml", *options]) == 0
    shown = capsys.readouterr()
    definition: dict[Any, Any] = yaml.safe_load(shown.out)
    return definition, shown.err


@pytest.mark.parametrize(("origin", "requirement"), ORIGINS)
def test_a_build_names_where_it_came_from(
    origin: dict[str, Any] | None, requirement: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from(monkeypatch, origin)
    told: list[str] = []
    assert own_package(told.append) == requirement
    local = origin is not None and origin["url"].startswith("file:")
    assert [(origin or {})["url"] in note and PUBLISHED in note for note in told] == ([True] if local else [])


def test_an_unpublished_build_is_installed_from_its_commit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    installed_from(monkeypatch, ORIGINS[3][0])
    definition, _ = printed(capsys, "gitlab")
    assert definition["variables"]["DELIVER_PACKAGE"] == GIT
    assert definition[".stage"]["image"] == "python:3.12-bookworm"  # the slim one has no git
    assert main(["init", str(tmp_path)]) == 0
    written = (tmp_path / ".gitlab-ci.yml").read_text("utf-8")
    assert yaml.safe_load(written)["variables"]["DELIVER_PACKAGE"] == GIT
    assert written.startswith(f"# Made by: deliver ci gitlab pipelines/default.yaml --package '{GIT}'\n")


@pytest.mark.parametrize("system", ["gitlab", "github"])
@pytest.mark.parametrize("set_to", ["", GIT, WHEEL_URL, WHEEL_FILE])
@pytest.mark.parametrize("generated_with", [None, WHEEL_URL])
def test_pip_is_given_the_package(
    system: str,
    set_to: str,
    generated_with: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """A job's install command, run by a shell with a `pip` that writes down its arguments."""
    installed_from(monkeypatch, None)
    definition, said = printed(capsys, system, *(["--package", generated_with] if generated_with else []))
    assert said == ""
    default = generated_with or PUBLISHED
    if system == "gitlab":
        (command,) = definition[".stage"]["before_script"]
        value = definition["variables"]["DELIVER_PACKAGE"]
        value = set_to or value  # variables of a project come before those of the file
    else:
        steps = definition["jobs"]["convert"]["steps"]
        command = next(step["run"] for step in steps if step.get("name") == "Install")
        value = expand(definition["env"]["DELIVER_PACKAGE"], {"vars": {"DELIVER_PACKAGE": set_to}})
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    pip.chmod(pip.stat().st_mode | stat.S_IXUSR)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "DELIVER_PACKAGE": value}
    done = subprocess.run(["bash", "-ec", command], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["install", set_to or default]


@pytest.mark.parametrize("system", ["gitlab", "github"])
def test_a_command_of_ones_own_replaces_pip(system: str, capsys: pytest.CaptureFixture[str]) -> None:
    definition, said = printed(capsys, system, "--install", "uv pip install deliver")
    assert "DELIVER_PACKAGE" not in json.dumps(definition, default=str)
    assert "uv pip install deliver" in json.dumps(definition, default=str)
    assert said == ""
    assert main(["ci", system, "pipelines/default.yaml", "--install", "x", "--package", "y"]) == 2
    assert "--package and --install are both given" in capsys.readouterr().err
