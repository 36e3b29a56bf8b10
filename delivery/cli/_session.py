"""The state of one `deliver` invocation: its workdir, the debug flag and the available steps."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delivery.device import DEVICES
from delivery.errors import UsageError
from delivery.steps import CATALOG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from delivery.pipeline.store import Store

WORKDIR = Path(".deliver")


@dataclass
class Session:
    """`debug` shows tracebacks; `steps` maps a step's name to its class."""

    workdir: Path = WORKDIR
    debug: bool = False
    steps: Mapping[str, type[Any]] = field(default_factory=lambda: CATALOG)
    answered: bool = False
    """Whether the one JSON object of `--json` has been printed; a later error does not print a second."""

    answer_so_far: Mapping[str, Any] = field(default_factory=dict)
    """Keys that the command's JSON always has, with the values they have if the command fails now."""

    def keep(self, value: Mapping[str, Any]) -> None:
        """Remember what the JSON would contain if the command failed here."""
        self.answer_so_far = {**self.answer_so_far, **value}

    def answer(self, value: Any) -> None:
        """Print the one JSON object of `--json`."""
        self.answered = True
        # JSON can escape characters that the stream's encoding lacks.
        narrow = "utf" not in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
        click.echo(json.dumps(value, ensure_ascii=narrow))

    @cached_property
    def store(self) -> Store:
        """The artifact store of the workdir; opened on first use."""
        from delivery.pipeline.store import Store

        return Store(self.workdir)


@contextmanager
def stdout_kept(for_answer: bool) -> Iterator[None]:
    """With `for_answer`, redirect to stderr what libraries and child processes write to stdout."""
    if not for_answer:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


pass_session = click.make_pass_decorator(Session)


def workdir_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--workdir DIR`: sets `session.workdir`; the command gets no argument for it."""

    def remember(ctx: click.Context, _: click.Parameter, value: str) -> None:
        ctx.ensure_object(Session).workdir = Path(value)

    return click.option(
        "--workdir",
        metavar="DIR",
        default=str(WORKDIR),
        envvar="DELIVER_WORKDIR",
        show_default=True,
        show_envvar=True,
        expose_value=False,
        is_eager=True,
        callback=remember,
        help="Where artifacts, logs and locks are kept.",
    )(function)


def device_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--device` of a command that loads a model: the command gets `device`, one of `DEVICES`."""
    return click.option(
        "--device",
        default="auto",
        show_default=True,
        type=click.Choice(DEVICES),
        help="Device to compute on; auto: the GPU if there is one.",
    )(function)


def read_key(path: Path) -> str:
    """Read a key from a file with a line `key`, or `name:key` as `serve` takes it.

    Raises UsageError `api-keys-unreadable`.
    """
    try:
        lines = [line.split("#", 1)[0].strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("api-keys-unreadable", f"cannot read the key in {path}", why=str(error)) from error
    keys = [line.rpartition(":")[2] for line in lines if line]
    if not keys:
        raise UsageError("api-keys-unreadable", f"{path} contains no key", why="expected a line with one")
    if not keys[0].isascii() or not keys[0].isprintable():
        raise UsageError(
            "api-keys-unreadable",
            f"the key in {path} cannot be sent",
            why="an HTTP header holds printable ASCII characters alone",
        )
    return keys[0]


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`: the command gets `as_json: bool` and prints exactly one JSON object on stdout.

    An error is printed as that object, unless the command has already printed one.
    """
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")(function)
