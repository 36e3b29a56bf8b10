"""Print the completion script of a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    bash: eval "$(deliver completion bash)"; zsh: the same with zsh; fish: deliver completion fish | source
    """
    completion = get_completion_class(shell)
    if completion is None:  # click knows all three
        raise RuntimeError(f"click has no completion for {shell}")
    root = ctx.find_root()
    click.echo(completion(root.command, {}, "deliver", "_DELIVER_COMPLETE").source())
