"""Serve an engine or a checkpoint over an OpenAI-compatible HTTP API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delivery.cli._session import device_option, pass_session, workdir_option
from delivery.errors import EnvironmentLacking, UsageError, environment_error
from delivery.pipeline.refs import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delivery.artifact import Artifact
    from delivery.cli._session import Session

_LEVELS = ["debug", "info", "warning", "error"]
_MIB = 1024 * 1024


@click.command()
@click.argument("ref", metavar="REF")
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on."
)
@click.option(
    "--port",
    default=23333,
    show_default=True,
    type=click.IntRange(0, 65535),
    metavar="N",
    help="Port to listen on; 0: any free port.",
)
@click.option(
    "--model-name",
    metavar="NAME",
    help="Name under which the model is served; default: the model's or folder's.",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File of `name:key` lines; every request then needs a key.",
)
@click.option("--oidc-issuer", metavar="URL", help="Accept bearer tokens of this OpenID Connect issuer.")
@click.option("--oidc-audience", metavar="NAME", help="Audience required of bearer tokens; default: any.")
@click.option(
    "--allow-unauthenticated",
    is_flag=True,
    help="Allow listening on a public address without authentication.",
)
@click.option(
    "--rate-limit",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0),
    metavar="X",
    help="Maximum requests per minute and caller; 0: unlimited.",
)
@click.option(
    "--max-body-mib",
    default=4.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    metavar="MIB",
    help="Maximum size of a request body in MiB.",
)
@click.option(
    "--max-queue",
    default=1024,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="Maximum number of waiting requests; further ones are answered with status 429.",
)
@click.option(
    "--drain-timeout",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Time for running requests to finish after SIGTERM, in seconds.",
)
@device_option
@click.option(
    "--max-model-len",
    "--max-session-len",
    type=int,
    metavar="N",
    help="Maximum input plus output tokens of a request; default: as the engine was built.",
)
@click.option(
    "--max-num-seqs",
    type=int,
    metavar="N",
    help="Maximum number of requests in a batch; default: as the engine was built.",
)
@click.option(
    "--max-num-batched-tokens",
    type=int,
    metavar="N",
    help="Maximum number of tokens in a step; default: as the engine was built.",
)
@click.option(
    "--enable-prefill/--no-enable-prefill",
    default=None,
    help="Fill steps with prefill tokens; off (for chat): decode first; default: as the engine was built.",
)
@click.option(
    "--cache-max-entry-count",
    type=float,
    metavar="X",
    help="KV cache size: blocks if at least 1, else share of free memory; default: as the engine was built.",
)
@click.option(
    "--block-size", type=int, metavar="N", help="Tokens per KV block; default: as the engine was built."
)
@click.option(
    "--kv",
    type=click.Choice(["auto", "int8", "int4", "fp8"]),
    help="Data type of the KV cache; default: as the engine was built.",
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(_LEVELS),
    help="Minimum severity to log; debug adds the time per layer.",
)
@click.option(
    "--log-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Log to this file, with rotation, instead of stderr.",
)
@click.option(
    "--log-max-mib",
    default=64.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    metavar="MIB",
    help="Maximum size of a log file in MiB; 4 files are kept.",
)
@workdir_option
@pass_session
def command(
    session: Session,
    /,
    ref: str,
    host: str,
    port: int,
    model_name: str | None,
    api_key_file: Path | None,
    oidc_issuer: str | None,
    oidc_audience: str | None,
    allow_unauthenticated: bool,
    rate_limit: float,
    max_body_mib: float,
    max_queue: int,
    drain_timeout: float,
    log_level: str,
    log_file: Path | None,
    log_max_mib: float,
    **engine_options: Any,
) -> None:
    """Serve REF: an engine, a checkpoint (quantised or not) or a Hugging Face directory.

    The chat page is at /, the API page at /docs, metrics at /metrics.
    """
    try:
        from delivery.serving.app import Settings
        from delivery.serving.launch import configure_logging, listen, serve
    except ModuleNotFoundError as error:
        raise EnvironmentLacking(
            "extra-missing",
            "deliver serve needs the extra [serve]",
            why=f"{error.name} is not installed",
            hint="pip install 'deliver[serve]'",
        ) from error
    from delivery.checkpoint import Checkpoint
    from delivery.serving.auth import Authenticator, Oidc, check_bind, read_keys

    auth = Authenticator(
        keys=read_keys(api_key_file) if api_key_file else {},
        oidc=Oidc.discover(oidc_issuer, oidc_audience) if oidc_issuer else None,
    )
    check_bind(host, auth, allow_unauthenticated=allow_unauthenticated)
    artifact = resolve(session.store, ref)
    try:
        configure_logging(log_level, log_file, round(log_max_mib * _MIB), files=3)
    except OSError as error:
        if environment_error(error) is not None:
            raise
        raise UsageError(
            "log-file-unusable",
            f"cannot log to {log_file}",
            why=error.strerror or "",
            hint="choose another --log-file",
        ) from error
    checkpoint = Checkpoint.open(artifact.path)
    chosen = {key: value for key, value in engine_options.items() if value is not None}
    _check_engine(chosen, checkpoint.config)
    tokenizer = checkpoint.tokenizer()
    listener = listen(host, port)
    settings = Settings(
        engine=artifact.path,
        model_name=model_name or _name(session, artifact),
        engine_options=chosen,
        auth=auth,
        max_body_bytes=round(max_body_mib * _MIB),
        rate_per_minute=rate_limit,
        max_queue=max_queue,
        drain_timeout_s=drain_timeout,
    )
    click.echo(f"serving {settings.model_name} on http://{host}:{listener.getsockname()[1]}", err=True)
    serve(settings, tokenizer, listener)


def _check_engine(options: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Check before the server starts what the engine would refuse in its own process.

    Raises UsageError `engine-option-invalid`, `session-too-long`, EnvironmentLacking `no-gpu`.
    """
    from delivery.device import resolve_device
    from delivery.engine.options import EngineOptions
    from delivery.model.families import family_for

    EngineOptions.of(options)
    resolve_device(options.get("device", "auto"))
    longest = family_for(config).config(config).max_position
    asked = options.get("max_model_len")
    if asked is not None and asked > longest:
        raise UsageError(
            "session-too-long",
            f"--max-model-len {asked} exceeds the model's maximum length",
            why=f"its config states max_position_embeddings {longest}",
            hint=f"--max-model-len {longest}",
        )


def _name(session: Session, artifact: Artifact) -> str:
    """The folder's name; for an artifact of the store, the model that it was made from."""
    from delivery.pipeline.single import subject_name

    if artifact.path.name != artifact.digest:
        return artifact.path.resolve().name
    return subject_name({"ref": (artifact,)}, session.store)
