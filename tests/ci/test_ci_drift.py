"""The CI files of this repository are what `deliver ci` prints for its pipeline file."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from delivery.cli._ci import SYSTEMS
from delivery.cli._group import commands


@pytest.mark.parametrize("system", list(SYSTEMS))
def test_ci_file_is_up_to_date(system: str) -> None:
    text = Path(SYSTEMS[system]).read_text("utf-8")
    first = text.splitlines()[0]
    assert first.startswith("# Made by: deliver ci ")
    arguments = shlex.split(first.removeprefix("# Made by: deliver "))
    assert arguments[:3] == ["ci", system, "pipelines/default.yaml"]
    done = CliRunner().invoke(commands, arguments)
    assert done.exit_code == 0, done.output
    assert done.output == text, f"run: deliver {shlex.join(arguments)} > {SYSTEMS[system]}"


@pytest.mark.parametrize("path", sorted(Path(".github/workflows").glob("*.yml")), ids=lambda p: p.name)
def test_actions_are_pinned_and_tokens_are_small(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            if "uses" in step:
                _, _, revision = step["uses"].partition("@")
                assert len(revision) == 40, step["uses"]
                if step["uses"].startswith("actions/checkout@"):
                    assert step["with"]["persist-credentials"] is False
