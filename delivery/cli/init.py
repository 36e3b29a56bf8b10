"""Write a pipeline, CI files and smoke suites into your repository."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from delivery.cli._session import Session, pass_session
from delivery.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PIPELINE = "pipelines/default.yaml"
_SUITES = "smoke"
# For a model of your own: the sample counts of a real release.
_OWN = "pipelines/thorough.yaml"
# The pipeline's first line names it, for editors that complete and check.
_SCHEMA = "pipelines/pipeline.schema.json"
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_CI = ("gitlab", "github")


@click.command()
@click.argument("folder", required=False, default=".", metavar="[DIR]")
@click.option(
    "--model",
    default="demo",
    show_default=True,
    metavar="PATH|demo|HUB_ID|URL",
    help="Model of the pipeline.",
)
@click.option("--ci", "systems", multiple=True, type=click.Choice(_CI), help="CI system; default: both.")
@pass_session
def command(session: Session, folder: str, model: str, systems: tuple[str, ...]) -> None:
    """Write a commented pipeline, CI definitions and smoke suites into DIR (default: here).

    Nothing is overwritten: if a file already exists, the command names it and writes nothing.
    """
    root = Path(folder)
    around = next(path for path in (root, *root.absolute().parents) if path.exists())
    if not around.is_dir():
        raise UsageError(
            "out-unusable", f"{root} cannot be created", why=f"{around} is a file", hint="choose another DIR"
        )
    files = _files(session, model, systems or _CI)
    taken = [name for name in files if (root / name).exists()]
    if taken:
        raise UsageError(
            "init-exists",
            f"{root} has files that `deliver init` would write",
            why=", ".join(taken),
            hint="move them away; or use `deliver ci` to print the CI definition alone",
        )
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
        click.echo(f"wrote {path}")
    click.echo("add .deliver/ and .cache/ to .gitignore; then: deliver run --plan, and deliver run")


def _files(session: Session, model: str, systems: tuple[str, ...]) -> Mapping[str, str]:
    """Name → text of everything that is written."""
    from delivery.cli._ci import SYSTEMS, CiOptions, own_package, render_ci
    from delivery.pipeline.spec import load_pipeline
    from delivery.resources import resource

    pipeline = resource(_PIPELINE if model == "demo" else _OWN).read_text("utf-8")
    pipeline = pipeline.replace("\nmodel: demo\n", f"\nmodel: {_yaml(model)}\n", 1)
    pipeline = pipeline.replace(f"{_OWN} --model ORG/MODEL", _PIPELINE)
    out = {_PIPELINE: pipeline, _SCHEMA: resource(_SCHEMA).read_text("utf-8")}
    suites = resource(_SUITES)
    for suite in sorted(p for p in suites.iterdir() if p.suffix in (".yaml", ".yml", ".json", ".jsonl")):
        out[f"{_SUITES}/{suite.name}"] = suite.read_text("utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "pipeline.yaml"
        path.write_text(pipeline, "utf-8")
        loaded = load_pipeline(path, steps=session.steps)
    package = own_package(partial(click.echo, err=True))
    for system in systems:
        words = ["deliver", "ci", system, _PIPELINE, *([] if package is None else ["--package", package])]
        options = CiOptions(package, command=shlex.join(words))
        out[SYSTEMS[system]] = render_ci(system, loaded, _PIPELINE, options)
    return out


def _yaml(text: str) -> str:
    """A text as a YAML scalar: plain where that is safe, else as JSON, which is valid YAML."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
