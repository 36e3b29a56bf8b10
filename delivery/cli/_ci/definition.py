"""A pipeline as a CI system sees it, and the file that it reads.

Stages become jobs in a row, not side by side: two checks that share a device would disturb each
other's measurements. What a job made travels to the next by content, so a job finds its input cached.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined

from delivery.artifact import Kind
from delivery.cli._ci.package import PUBLISHED
from delivery.errors import UsageError
from delivery.steps.step import is_check

if TYPE_CHECKING:
    from delivery.pipeline.spec import Pipeline

SYSTEMS = {"gitlab": ".gitlab-ci.yml", "github": ".github/workflows/deliver.yml"}
"""CI system → where it looks for its definition."""

_TEMPLATES = Path(__file__).parent
_ON_ANY_MACHINE = ("convert", "package")
_WEIGHTS = (
    "**/*.safetensors",
    "**/*.gguf",
    "**/*.bin",
    "**/*.safetensors.index.json",
    "**/config.json",
    "**/generation_config.json",
    "**/tokenizer*",
    "**/chat_template*",
)
_DEPLOY = "deploy"
_IMAGE, _GIT_IMAGE = "python:3.12-slim-bookworm", "python:3.12-bookworm"


@dataclass(frozen=True, slots=True)
class CiOptions:
    """What a CI definition needs beyond the pipeline.

    package: pip requirement of deliver, which the CI variable DELIVER_PACKAGE overrides; default: this
    version on a package index. install: shell command that installs deliver, instead of both.
    image: container that jobs run in (GitLab); default: Python's, with git if the requirement needs it.
    watch: further globs whose changes trigger a run. command: how this definition was made.
    """

    package: str | None = None
    install: str | None = None
    image: str | None = None
    watch: tuple[str, ...] = ()
    command: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """One stage as a job. `key` is its id as a name of a job; `after` the job before it."""

    stage: str
    is_check: bool
    makes_release: bool
    needs_gpu: bool
    after: str | None


def render_ci(system: str, pipeline: Pipeline, file: str, options: CiOptions) -> str:
    """The CI definition of a pipeline as text. `file` is the pipeline file, relative to the repository.

    Raises UsageError `stage-name-taken` for a stage with the name of the deploy job.
    """
    jobs = _jobs(pipeline)
    package = options.package or PUBLISHED
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        variable_start_string="[[",
        variable_end_string="]]",
        block_start_string="[%",
        block_end_string="%]",
        comment_start_string="[#",
        comment_end_string="#]",
    )
    environment.filters["q"] = lambda text: json.dumps(text, ensure_ascii=False)
    environment.filters["expression"] = lambda text: "'" + text.replace("'", "''") + "'"
    return environment.from_string((_TEMPLATES / f"{system}.yml.j2").read_text("utf-8")).render(
        jobs=jobs,
        release=next((job for job in jobs if job.makes_release), None),
        gpu=any(job.needs_gpu for job in jobs),
        pipeline=shlex.quote(file),
        paths=[*_weights(pipeline.model), file, "smoke/**", "baselines/**", *options.watch],
        package=package,
        install=options.install or 'pip install "$DELIVER_PACKAGE"',
        by_package=not options.install,
        image=options.image or (_GIT_IMAGE if "git+" in package else _IMAGE),
        command=options.command or f"deliver ci {system} {file}",
        chart=_chart(pipeline),
    )


def _jobs(pipeline: Pipeline) -> list[Job]:
    out: list[Job] = []
    for stage in pipeline.stages:
        if stage.id == _DEPLOY:
            raise UsageError(
                "stage-name-taken",
                f"a stage of {pipeline.name} is called {_DEPLOY!r}",
                why="CI definitions have a job of that name after the last stage",
                hint="give the step another `id`",
            )
        out.append(
            Job(
                stage=stage.id,
                is_check=is_check(stage.step),
                makes_release=stage.step.makes == Kind.RELEASE,
                needs_gpu=pipeline.device != "cpu" and stage.step.name not in _ON_ANY_MACHINE,
                after=out[-1].stage if out else None,
            )
        )
    return out


def _weights(model: str) -> tuple[str, ...]:
    """Globs of the weights: the model's folder if it is in the repository, else the usual places."""
    is_local = "/" in model and "://" not in model and (model.startswith(".") or Path(model).is_dir())
    if not is_local:
        return _WEIGHTS
    return (re.sub(r"^\./", "", model.rstrip("/")) + "/**",)


def _chart(pipeline: Pipeline) -> str:
    """The name of the Helm release, unless the deploy job sets another."""
    from delivery.pipeline.runner import model_name
    from delivery.release.chart import chart_name

    for stage in pipeline.stages:
        if stage.step.makes == Kind.RELEASE and stage.params.get("release_name"):
            return str(stage.params["release_name"])
    return chart_name(model_name(pipeline.model))
