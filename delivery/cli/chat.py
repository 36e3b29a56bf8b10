"""Chat with a model in the terminal: a local engine or a server's URL."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delivery.cli._session import device_option, pass_session, read_key, workdir_option
from delivery.errors import UsageError
from delivery.pipeline.refs import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delivery.cli._session import Session

Messages = list[dict[str, str]]


@click.command()
@click.argument("ref", metavar="REF|URL")
@click.option("--system", metavar="TEXT", help="System message that every conversation begins with.")
@click.option(
    "--max-tokens",
    default=512,
    type=click.IntRange(1),
    show_default=True,
    metavar="N",
    help="Maximum length of an answer in tokens.",
)
@click.option(
    "--temperature",
    default=0.0,
    type=click.FloatRange(0),
    show_default=True,
    metavar="X",
    help="Sampling temperature; 0: always the most likely token (greedy).",
)
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File with the API key for a URL: a line `key` or `name:key`.",
)
@click.option(
    "--api-key",
    envvar="OPENAI_API_KEY",
    show_envvar=True,
    metavar="KEY",
    help="The API key for a URL; --api-key-file keeps it out of the process list.",
)
@device_option
@workdir_option
@pass_session
def command(
    session: Session,
    ref: str,
    system: str | None,
    max_tokens: int,
    temperature: float,
    api_key_file: Path | None,
    api_key: str | None,
    device: str,
) -> None:
    """Chat with REF (an engine, a checkpoint) or the server at a URL.

    /reset starts a new conversation; /exit or end of input quits.
    """
    start: Messages = [{"role": "system", "content": system}] if system else []
    if ref.startswith(("http://", "https://")):
        from delivery.serving.remote_chat import RemoteChat

        key = api_key if api_key_file is None else read_key(api_key_file)
        _converse(RemoteChat(ref, key, max_tokens, temperature).answer, start)
        return
    from delivery.engine import SamplingParams
    from delivery.serving.local_chat import LocalChat

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    with LocalChat(resolve(session.store, ref).path, sampling, device=device) as chat:
        _converse(chat.answer, start)


def _converse(answer: Callable[[Messages], Iterator[str]], start: Messages) -> None:
    messages = list(start)
    while (line := _read()) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(start)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        pieces = []
        try:
            for piece in answer(messages):
                pieces.append(piece)
                click.echo(piece, nl=False)
                sys.stdout.flush()
        except UsageError as error:
            if error.code == "request-too-long":
                error.what = "the conversation has become too long"
                error.hint = "/reset forgets it; or a smaller --max-tokens"
            raise
        click.echo()
        messages.append({"role": "assistant", "content": "".join(pieces)})


def _read() -> Any:
    prompt = "> " if sys.stdin.isatty() else ""
    try:
        return input(prompt).strip()
    except EOFError:
        return None
