"""Explain an error code: its meaning, usual causes and remedies."""

from __future__ import annotations

from pathlib import Path

import click

import delivery
from delivery.errors import UsageError, did_you_mean

FOLDER = Path(delivery.__file__).parent / "explanations"


def codes() -> list[str]:
    """All error codes that have an explanation."""
    return sorted(page.stem for page in FOLDER.glob("*.md"))


def _complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return [code for code in codes() if code.startswith(incomplete)]


@click.command()
@click.argument("code", required=False, shell_complete=_complete)
def command(code: str | None) -> None:
    """Explain the error CODE, the word in `error[CODE]`. Without CODE, list all codes."""
    if code is None:
        click.echo("\n".join(codes()))
        return
    name = code.removeprefix("error[").removesuffix("]")
    if name not in codes():
        raise UsageError("unknown-code", f"there is no error code {name!r}", hint=did_you_mean(name, codes()))
    page = (FOLDER / f"{name}.md").read_text("utf-8").removeprefix(f"# {name}\n").strip()
    click.echo(f"{name}\n\n{page}")
