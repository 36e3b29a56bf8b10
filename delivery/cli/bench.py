"""Load-test an engine or any OpenAI-compatible URL, and report latencies and throughput."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from delivery.cli._session import (
    Session,
    device_option,
    json_option,
    pass_session,
    read_key,
    stdout_kept,
    workdir_option,
)
from delivery.pipeline.refs import resolve


@click.command()
@click.argument("target", metavar="REF|URL")
@click.option(
    "--workload",
    default="fixed",
    show_default=True,
    metavar="NAME|FILE",
    help="Workload: the name of a built-in one, or a JSON file.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    metavar="R",
    help="Requests per second, Poisson arrivals; default: the workload's arrivals.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    metavar="N",
    help="Requests kept in flight, instead of a rate; default: the workload's arrivals.",
)
@click.option(
    "--requests",
    type=click.IntRange(1),
    metavar="N",
    help="Number of measured requests; default: the workload's.",
)
@click.option(
    "--warmup",
    type=click.IntRange(0),
    metavar="N",
    help="Number of warm-up requests, which are not measured; default: the workload's.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    metavar="N",
    help="Seed of lengths, arrivals and tokens; default: the workload's.",
)
@click.option(
    "--goodput",
    multiple=True,
    metavar="NAME:MS",
    help="Goodput: count requests whose ttft, tpot or e2el is at most MS milliseconds. Repeat for several.",
)
@device_option
@click.option(
    "--model", metavar="NAME", help="Model to request from a URL; default: the first that the server lists."
)
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File with the API key for a URL: a line `key` or `name:key`; default: no key.",
)
@click.option(
    "--prompts",
    default="text",
    show_default=True,
    type=click.Choice(["text", "tokens"]),
    help="What prompts sent to a URL consist of: common words, or token ids.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write records.jsonl and summary.json there; default: nowhere.",
)
@json_option
@workdir_option
@pass_session
def command(
    session: Session,
    target: str,
    workload: str,
    rate: float | None,
    concurrency: int | None,
    requests: int | None,
    warmup: int | None,
    seed: int | None,
    goodput: tuple[str, ...],
    device: str,
    model: str | None,
    api_key_file: Path | None,
    prompts: Literal["text", "tokens"],
    out: Path | None,
    as_json: bool,
) -> None:
    """Load-test REF (an engine, a checkpoint, a Hugging Face directory) or URL.

    Latencies are measured from the scheduled arrival. The JSON uses the key names of `vllm bench serve`.
    """
    from delivery.bench.run import BenchOptions, ProgressLine, lines, parse_goodput, run_bench

    url = target.startswith(("http://", "https://"))
    options = BenchOptions(
        target=target if url else str(resolve(session.store, target).path),
        workload=workload,
        rate=rate,
        concurrency=concurrency,
        requests=requests,
        warmup=warmup,
        seed=seed,
        goodput=parse_goodput(goodput),
        device=device,
        model=model,
        api_key=read_key(api_key_file) if api_key_file else None,
        prompts=prompts,
        out=out,
    )
    with stdout_kept(for_answer=as_json):
        summary = run_bench(options, ProgressLine())
    if as_json:
        session.answer(summary)
    else:
        click.echo("\n".join(lines(summary)))
