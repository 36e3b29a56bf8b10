"""Build a calibration corpus from a knowledge base of your own."""

from __future__ import annotations

from pathlib import Path

import click

from delivery.cli._session import Session, json_option, pass_session


@click.group()
def command() -> None:
    """Corpora: text that models are calibrated and evaluated on."""


@command.command(short_help="Make calibration and held-out files of documents.")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="SOURCE...")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="New folder for the corpus.",
)
@click.option(
    "--similarity",
    default=0.8,
    show_default=True,
    metavar="SHARE",
    help="Share of common phrases, 0 to 1, from which two texts count as one.",
)
@json_option
@pass_session
def build(session: Session, sources: tuple[Path, ...], out: Path, similarity: float, as_json: bool) -> None:
    """Make calibration and held-out files of SOURCEs: Markdown, HTML, CSV, JSON lines, text, or folders.

    Sections become documents; questions with answers become conversations, rendered later through the
    model's chat template. Repetitions and near-repetitions are dropped, a tenth is held out.
    """
    from delivery.corpus.build import build as build_corpus

    built = build_corpus(sources, out, similarity)
    if as_json:
        session.answer({"out": str(out), **built.row()})
        return
    dropped = f"{built.duplicates} repeated, {built.near_duplicates} nearly so, {built.too_short} too short"
    click.echo(f"{built.files} files, {built.read} documents; dropped: {dropped}")
    click.echo(f"{built.calibration} to calibrate on ({built.conversations} conversations in all)")
    click.echo(f"{built.held_out} held out")
    click.echo(f"deliver calibrate --corpus {out} ...")
