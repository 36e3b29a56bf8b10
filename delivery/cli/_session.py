"""What one invocation of `deliver` knows: its workdir, whether to debug, which steps there are."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delivery.errors import DeliverError
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

    @cached_property
    def store(self) -> Store:
        """The artifact store of the workdir; opened on first use."""
        from delivery.pipeline.store import Store

        return Store(self.workdir)


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


@contextmanager
def answering(as_json: bool) -> Iterator[Callable[[Any], None]]:
    """Gives a function that prints the one JSON object, and prints an error as that object otherwise.

    Without `as_json` nothing is printed here.
    """
    answered = not as_json

    def answer(value: Any) -> None:
        nonlocal answered
        if not answered:
            answered = True
            click.echo(json.dumps(value, ensure_ascii=False))

    try:
        yield answer
    except DeliverError as error:
        answer({"passed": False, "error": {"code": error.code, "what": error.what, "why": error.why}})
        raise


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`: the command gets `as_json: bool` and prints exactly one JSON object on stdout."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")(function)
