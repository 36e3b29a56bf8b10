"""Documentation that can be wrong by machine: links, commands, options, error pages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from delivery.cli._group import commands
from delivery.steps import step_names

PAGES = sorted([*Path().glob("*.md"), *Path("docs").rglob("*.md")])
_LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
_FENCE = re.compile(r"^```(?:sh)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def ids(path: Path) -> str:
    return path.as_posix()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


def test_every_step_has_a_page() -> None:
    assert {path.stem for path in Path("docs/steps").glob("*.md")} == set(step_names())


def told(page: Path) -> list[list[str]]:
    """Every `deliver …` command of a page's blocks, as words."""
    out = []
    for block in _FENCE.findall(page.read_text("utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            text = line.split("#")[0].strip().removeprefix(".venv/bin/")
            if text.startswith("deliver ") and "…" not in text.split("deliver ")[1].split(" ")[0]:
                out.append(shlex.split(text)[1:])
    return out


@pytest.mark.parametrize("page", [p for p in PAGES if told(p)], ids=ids)
def test_commands_and_options_exist(page: Path) -> None:
    with click.Context(commands) as ctx:
        for words in told(page):
            command = commands.get_command(ctx, words[0])
            assert command is not None, words
            if isinstance(command, click.Group) and len(words) > 1 and not words[1].startswith("-"):
                command = command.get_command(ctx, words[1])
                assert command is not None, words
            known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
            for word in words[1:]:
                if word.startswith("--"):
                    assert word.partition("=")[0] in known, words
