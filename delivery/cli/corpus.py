"""Build a calibration corpus from your own knowledge base."""

from __future__ import annotations

from pathlib import Path

import click

from delivery.cli._session import Session, json_option, pass_session


@click.group()
def command() -> None:
    """Manage corpora: text that models are calibrated and evaluated on."""


@command.command(short_help="Convert documents into calibration and held-out files.")
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
    help="Share of common phrases, 0 to 1, above which two texts count as near-duplicates.",
)
@json_option
@pass_session
def build(session: Session, sources: tuple[Path, ...], out: Path, similarity: float, as_json: bool) -> None:
    """Convert SOURCEs into calibration and held-out files: Markdown, HTML, CSV, JSON lines, text, or folders.

    Sections become documents; questions with answers become conversations, which are rendered later with the
    model's chat template. Duplicates and near-duplicates are dropped; a tenth of the text is held out.
    """
    from delivery.corpus.build import build as build_corpus

    built = build_corpus(sources, out, similarity)
    if as_json:
        session.answer({"out": str(out), **built.row()})
        return
    dropped = (
        f"{built.duplicates} duplicates, {built.near_duplicates} near-duplicates, {built.too_short} too short"
    )
    click.echo(f"{built.files} files, {built.read} documents; dropped: {dropped}")
    click.echo(f"{built.calibration} for calibration ({built.conversations} conversations in total)")
    click.echo(f"{built.held_out} held out")
    click.echo(f"deliver calibrate --corpus {out} ...")
