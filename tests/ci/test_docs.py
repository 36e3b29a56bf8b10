"""What a machine can check in documentation: links, commands, options, values of choices, error pages."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import click
import pytest

import delivery
from delivery.cli._group import commands
from delivery.steps import step_names

EXPLANATIONS = Path(delivery.__file__).parent / "explanations"
PAGES = sorted([*Path().glob("*.md"), *Path("docs").rglob("*.md")])
_LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`(deliver [^`]+)`")


def ids(path: Path) -> str:
    return path.as_posix()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text("utf-8")):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text("utf-8")), f"{target}#{anchor}"


def anchors(text: str) -> set[str]:
    """Headings as GitHub and GitLab link to them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_step_has_a_page() -> None:
    assert {path.stem for path in Path("docs/steps").glob("*.md")} == set(step_names())


def command_lines(text: str) -> list[list[str]]:
    """Every `deliver …` command line in a page's code blocks and code spans, as words without `deliver`."""
    lines = []
    for language, block in _BLOCK.findall(text):
        if language in ("", "sh"):
            lines += block.replace("\\\n", " ").splitlines()
    lines += [span.replace("\n", " ") for span in _SPAN.findall(_BLOCK.sub("", text))]
    found = []
    for line in lines:
        words = line.split(" #")[0].strip().removeprefix(".venv/bin/")
        if words.startswith("deliver ") and not words.removeprefix("deliver ").startswith("…"):
            found.append(shlex.split(words)[1:])
    return found


def wrong_in(words: list[str]) -> str:
    """Why the program would not accept a command line, or ''. A command in capitals stands for any."""
    with click.Context(commands) as ctx:
        name, *rest = words
        if name.isupper() or name.startswith("-"):
            return ""
        command = commands.get_command(ctx, name)
        while isinstance(command, click.Group) and rest and rest[0].islower():
            ctx, name, *rest = click.Context(command, parent=ctx), *rest
            command = command.get_command(ctx, name)
        if command is None:
            return f"no command {name!r}"
        options = {n: p for p in command.params for n in (*p.opts, *p.secondary_opts)}
        options["--help"] = click.Option(["--help"], is_flag=True)
        for word, following in pairwise([*rest, ""]):
            if not word.startswith("--"):
                continue
            option, _, value = word.partition("=")
            if option not in options:
                return f"{name} has no option {option}"
            value, choices = value or following, choices_of(options[option])
            if choices and value not in choices and not value.isupper():
                return f"{name} {option} does not take {value!r}"
    return ""


def choices_of(option: click.Parameter) -> list[str]:
    """The values that an option is limited to; [] for any. Steps list theirs in the metavar: `auto|cpu`."""
    if isinstance(option.type, click.Choice):
        return list(option.type.choices)
    listed = (option.metavar or "").split("|")
    return listed if len(listed) > 1 and all(value.islower() for value in listed) else []


@pytest.mark.parametrize("page", [*PAGES, *sorted(EXPLANATIONS.glob("*.md"))], ids=lambda path: path.stem)
def test_commands_options_and_choices_exist(page: Path) -> None:
    wrong = [found for words in command_lines(page.read_text("utf-8")) if (found := wrong_in(words))]
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("`deliver quantise --checkpoint X`", "no command 'quantise'"),
        ("```\ndeliver quantize --chekpoint X\n```", "quantize has no option --chekpoint"),
        ("```\ndeliver build \\\n  --kv int5\n```", "build --kv does not take 'int5'"),
        ("`deliver baseline updat --reason X`", "no command 'updat'"),
        ("`deliver quantize --scheme=awq-w4a16 --checkpoint REF`", ""),
        ("`deliver STEP --help`", ""),
    ],
)
def test_a_wrong_command_line_is_found(line: str, reason: str) -> None:
    (words,) = command_lines(line)
    assert wrong_in(words) == reason


def test_figures_of_the_readme_are_those_of_the_docs() -> None:
    readme = Path("README.md").read_text("utf-8")
    rows = re.findall(r"^\|.*\|.*\|.*\|$", readme.partition("## Measured")[2], re.MULTILINE)[2:]
    measured = "".join(
        Path(f"docs/{page}.md").read_text("utf-8") for page in ("performance", "quality", "gate")
    )
    for row in rows:
        figures = re.findall(r"(?<![\w.])\d+\.\d+", row)
        assert figures, row
        assert [f for f in figures if not re.search(rf"(?<![\d.]){re.escape(f)}(?!\d)", measured)] == [], row


def test_the_readme_has_commands() -> None:
    assert len(command_lines(Path("README.md").read_text("utf-8"))) > 10
