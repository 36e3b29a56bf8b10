"""Every option of every command says what it does, and what goes there."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from delivery.cli._group import commands
from delivery.cli._session import Session

# What click writes where nothing is said: a type, which says neither what nor in which unit.
_BARE = r"(INTEGER|FLOAT|BOOLEAN)\b|(PATH|FILENAME|DIRECTORY|FILE_OR_DIRECTORY)$"
_FREE_TEXT = {"--reason", "--system"}


def every_command() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Name, command and context of each, groups' own commands included."""
    root = click.Context(commands, obj=Session(), info_name="deliver")
    waiting: list[tuple[click.Command, click.Context]] = [(commands, root)]
    while waiting:
        command, ctx = waiting.pop()
        yield ctx.command_path, command, ctx
        if isinstance(command, click.Group):
            for name in command.list_commands(ctx):
                found = command.get_command(ctx, name)
                assert found is not None
                waiting.append((found, click.Context(found, parent=ctx, info_name=name)))


OPTIONS = [
    pytest.param(option, ctx, id=f"{path} {option.opts[0]}")
    for path, command, ctx in every_command()
    for option in command.params
    if isinstance(option, click.Option)
]


def test_the_walk_finds_the_commands() -> None:
    paths = {path for path, _, _ in every_command()}
    assert {"deliver run", "deliver quantize", "deliver baseline noise", "deliver ci gitlab"} <= paths
    assert len(OPTIONS) > 150


@pytest.mark.parametrize(("option", "ctx"), OPTIONS)
def test_an_option_says_what_it_does(option: click.Option, ctx: click.Context) -> None:
    text = (option.help or "").partition("  [default: ")[0]
    assert text[-1:] in (".", ")"), f"no sentence: {text!r}"
    assert text[0].isupper() or text[0] == "`" or text.startswith("auto"), text
    assert len(text.split()) >= 3, f"too short to say anything: {text!r}"


@pytest.mark.parametrize(("option", "ctx"), OPTIONS)
def test_an_option_says_what_goes_there(option: click.Option, ctx: click.Context) -> None:
    if option.is_flag:
        return
    metavar = option.make_metavar(ctx)
    assert not re.match(_BARE, metavar), f"{metavar} is a type, not what goes there"
    assert metavar != "TEXT" or option.opts[0] in _FREE_TEXT, "TEXT says nothing"


@pytest.mark.parametrize(("option", "ctx"), OPTIONS)
def test_an_option_shows_its_default(option: click.Option, ctx: click.Context) -> None:
    if isinstance(option.default, int | float | str) and not option.is_flag and not option.hidden:
        shown = option.get_help_record(ctx)
        assert shown is not None
        assert "default: " in shown[1]
