"""The command group: names come from file names, a module is imported when its command is used."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import click

from delivery import __version__, steps
from delivery.cli._session import Session
from delivery.errors import UsageError, did_you_mean

_FOLDER = Path(__file__).parent
_DOCSTRING = re.compile(r'"""(.+)')
_STEP_DOCSTRING = re.compile(r'^@step\b.*?^    """(.+?)$', re.MULTILINE | re.DOTALL)


class Commands(click.Group):
    """All commands: the steps, and one per file of this folder."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_step_names(ctx), *_file_names()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _file_names():
            command: click.Command = import_module(f"delivery.cli.{cmd_name}").command
            command.name = cmd_name
            return command
        if cmd_name in _step_names(ctx):
            from delivery.cli._steps import step_command

            return step_command(_session(ctx).steps[cmd_name])
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            raise UsageError(
                "unknown-command",
                f"there is no command {args[0]!r}",
                hint=did_you_mean(args[0], self.list_commands(ctx)),
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        chain = [(name, _step_help(name)) for name in _step_names(ctx)]
        others = [(name, _first_line(_FOLDER / f"{name}.py")) for name in _file_names()]
        for title, rows in (("Steps", chain), ("Commands", others)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _session(ctx: click.Context) -> Session:
    return ctx.ensure_object(Session)


def _step_names(ctx: click.Context) -> list[str]:
    return list(_session(ctx).steps)


def _file_names() -> list[str]:
    return sorted(m.name for m in iter_modules([str(_FOLDER)]) if not m.name.startswith("_"))


def _first_line(path: Path) -> str:
    """The first line of a module's docstring, without importing the module."""
    return _found(_DOCSTRING.match(path.read_text("utf-8")))


def _step_help(name: str) -> str:
    """The first line of a step class' docstring, without importing its module."""
    path = Path(steps.__file__).parent / f"{name}.py"
    return _found(_STEP_DOCSTRING.search(path.read_text("utf-8"))) if path.exists() else ""


def _found(match: re.Match[str] | None) -> str:
    return match[1].removesuffix('"""').strip() if match else ""


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="First steps: `deliver doctor`, `deliver run --plan`, `deliver run` (a small demo model). "
    "`deliver COMMAND --help` says more; `deliver explain CODE` explains an error. Exit codes: 0 pass, "
    "1 a step failed, 2 usage, 3 gate failed, 4 undecided, 5 no baseline, 6 environment lacking, 70 a bug.",
)
@click.option(
    "--debug", is_flag=True, envvar="DELIVER_DEBUG", help="Show the traceback of an unexpected error."
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def commands(ctx: click.Context, debug: bool) -> Any:
    """From a weight commit to a signed Helm release, with a regression gate in between."""
    _session(ctx).debug |= debug
