"""One command per step, generated from the step's dataclass: a field is an option, the docstring the help."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delivery.cli._session import Session, json_option, stdout_kept, workdir_option
from delivery.device import DEVICES
from delivery.errors import UsageError
from delivery.pipeline.values import check_field, describe, error_code, is_flag, is_list, parsed, type_of
from delivery.steps.step import fields_of, is_check

if TYPE_CHECKING:
    from collections.abc import Callable

    from delivery.artifact import Json
    from delivery.pipeline.result import StageResult
    from delivery.steps.step import Field

_GATE_PIPELINE = "pipelines/default.yaml"
_REF = "REF is a path, a tag, or the beginning of an artifact's digest (`deliver ls`)."
_SEVERAL = " Separate several with commas, or repeat the option."


def step_command(step: type[Any]) -> click.Command:
    """The command of a step: its inputs, its parameters, and the options that all steps share."""
    text = inspect.cleandoc(step.__doc__ or "")
    command = click.Command(
        step.name,
        callback=_callback(step),
        help=text,
        short_help=text.partition("\n")[0],
        params=[_option(step, field) for field in fields_of(step)],
        epilog=_REF if any(field.is_input for field in fields_of(step)) else None,
    )
    return _shared(command, step)


def _shared(command: click.Command, step: type[Any]) -> click.Command:
    names = {field.name for field in fields_of(step)}
    options: list[Callable[[Any], Any]] = [
        click.option(
            "--out", "out__", metavar="DIR", help="Also write the artifact to DIR, a new or empty folder."
        ),
        click.option("--force", "force__", is_flag=True, help="Run the step even if its result is cached."),
        json_option,
        workdir_option,
    ]
    if "device" not in names:
        options.append(_device_option(hidden=not step.uses_device))
    if "seed" not in names:
        options.append(
            click.option(
                "--seed",
                "seed__",
                type=int,
                default=0,
                show_default=True,
                metavar="N",
                hidden=not step.seed_matters,
                help="Random seed, a whole number.",
            )
        )
    if is_check(step):
        options.append(
            click.option(
                "--pipeline",
                "pipeline__",
                metavar="FILE",
                help=f"Pipeline file whose `gate` judges; default: {_GATE_PIPELINE}.",
            )
        )
    for option in options:
        command = option(command)
    return command


def _device_option(*, hidden: bool) -> Callable[[Any], Any]:
    """`--device`; steps that compute on no device accept it too, so that all steps take the same options."""
    return click.option(
        "--device",
        "device__",
        default="auto",
        show_default=True,
        metavar="|".join(DEVICES),
        hidden=hidden,
        help="Device to compute on; auto: the GPU if there is one.",
    )


def _option(step: type[Any], field: Field) -> click.Option:
    names = [f"--{field.name.replace('_', '-')}", field.name]
    if field.is_input:
        many = field.metadata["many"]
        kind = field.metadata["kind"]
        required = not field.metadata["optional"] and not many
        help_text = field.metadata["help"] or f"{kind}.".capitalize()
        help_text += " Repeat for several." if many else ""
        return click.Option(names, metavar="REF", multiple=many, required=required, help=help_text)
    hint = type_of(step, field.name)
    help_text = field.metadata["help"]
    if is_flag(hint):
        both = f"{names[0]}/--no-{names[0].removeprefix('--')}"
        return click.Option([both, field.name], default=None, help=f"{help_text}{_default(field)}")
    return click.Option(
        names,
        metavar=_metavar(field, hint),
        multiple=is_list(hint),
        default=None,
        help=f"{help_text}{_SEVERAL if is_list(hint) else ''}{_default(field)}",
        shell_complete=_complete(field),
    )


def _default(field: Field) -> str:
    if field.metadata["secret"] or field.default in (None, "", (), [], {}):
        return ""
    value = field.default
    shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
    return f"  [default: {', '.join(map(str, shown)) if isinstance(shown, list | tuple) else shown}]"


def _choices(field: Field) -> tuple[str, ...]:
    choices = field.metadata["choices"]
    return tuple(choices() if callable(choices) else choices or ())


def _metavar(field: Field, hint: Any) -> str:
    if field.metadata["metavar"]:
        return str(field.metadata["metavar"])
    if choices := _choices(field):
        return "|".join(choices)
    words = {"a whole number": "N", "a number": "X"}
    return words.get(describe(hint).partition(" or ")[0], "TEXT")


def _complete(field: Field) -> Any:
    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        return [choice for choice in _choices(field) if choice.startswith(incomplete)]

    return complete


def _callback(step: type[Any]) -> Any:
    def run(**given: Any) -> None:
        session = click.get_current_context().ensure_object(Session)
        shared = {name: given.pop(name) for name in list(given) if name.endswith("__")}
        shared["json__"] = given.pop("as_json")
        instance = step(**_values(step, given))
        with stdout_kept(for_answer=shared["json__"]):
            result = _run(instance, session, shared)
        if shared["json__"]:
            error = {} if result.error is None else {"error": result.error.to_json()}
            path = shared["out__"] or str(result.artifact.path)
            session.answer({**result.to_json(), "path": path, **error})
        if result.error is not None:
            raise result.error

    return run


def _values(step: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """Field values from option texts. Raises UsageError `wrong-type`, `bad-value`."""
    out: dict[str, Any] = {}
    for field in fields_of(step):
        raw = given[field.name]
        if field.is_input:
            out[field.name] = tuple(raw) if field.metadata["many"] else raw
        elif raw is not None and raw != ():
            option = f"--{field.name.replace('_', '-')}"
            try:
                out[field.name] = check_field(step, field, _typed(raw, type_of(step, field.name)))
            except ValueError as error:
                raise UsageError(
                    error_code(error),
                    f"{option} of {step.name}",
                    why=str(error),
                    hint=f"deliver {step.name} --help",
                ) from error
    return out


def _typed(raw: Any, hint: Any) -> Any:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, tuple):
        return [value for text in raw for value in parsed(text, hint)]
    return parsed(raw, hint)


def _run(instance: Any, session: Session, shared: dict[str, Any]) -> StageResult:
    from delivery.pipeline.progress import display
    from delivery.pipeline.result import RunResult, table
    from delivery.pipeline.single import run_step

    gate = _gate(shared.get("pipeline__")) if is_check(type(instance)) else None
    out = Path(shared["out__"]) if shared["out__"] else None
    shown = display()
    try:
        result = run_step(
            instance,
            session.store,
            shown,
            out=out,
            device=shared.get("device__", "auto"),
            seed=shared.get("seed__", 0),
            gate=gate,
            force=shared["force__"],
        )
    finally:
        shown.close()
    if not shared["json__"]:
        click.echo(table(RunResult((result,), result.error, complete=False)))
        click.echo(f"\n{result.artifact.kind}: {out or result.artifact.path}")
    return result


def _gate(pipeline: str | None) -> dict[str, Json]:
    """The `gate` section that judges a check run on its own."""
    from delivery.pipeline.file import Gate
    from delivery.pipeline.spec import gate_json, read_gate
    from delivery.resources import resource

    if pipeline is not None:
        return read_gate(Path(pipeline))
    try:
        return read_gate(resource(_GATE_PIPELINE))
    except FileNotFoundError:
        return gate_json(Gate())
