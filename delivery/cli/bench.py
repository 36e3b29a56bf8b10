"""Load an engine or any OpenAI-compatible URL, and report latencies and throughput."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import click

from delivery.cli._session import Session, json_option, pass_session, workdir_option
from delivery.pipeline.refs import resolve


@click.command()
@click.argument("target", metavar="REF|URL")
@click.option("--workload", default="fixed", show_default=True, metavar="NAME|FILE", help="What is asked.")
@click.option("--rate", type=float, metavar="R", help="Requests per second, at random (Poisson).")
@click.option(
    "--concurrency", type=click.IntRange(1), metavar="N", help="Requests that are always in flight."
)
@click.option("--requests", type=click.IntRange(1), help="Number of requests; default: the workload's.")
@click.option("--warmup", type=click.IntRange(0), help="Requests that go first and are not recorded.")
@click.option("--seed", type=int, help="Seed of lengths, arrivals and tokens; default: the workload's.")
@click.option(
    "--goodput",
    multiple=True,
    metavar="NAME:MS",
    help="Limit of ttft, tpot or e2el that a good request keeps.",
)
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]))
@click.option("--model", help="Model name to ask a URL for; default: the first that it lists.")
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the key of a URL.",
)
@click.option(
    "--prompts",
    default="text",
    show_default=True,
    type=click.Choice(["text", "tokens"]),
    help="What a URL is sent: common words, or token ids.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write records and summary there.",
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
    """Load REF (an engine, a checkpoint, a Hugging Face directory) or URL, and measure.

    Latencies count from the scheduled arrival. The JSON has the key names of `vllm bench serve`.
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
        api_key=api_key_file.read_text("utf-8").strip() if api_key_file else None,
        prompts=prompts,
        out=out,
    )
    summary = run_bench(options, ProgressLine())
    click.echo(json.dumps(summary, ensure_ascii=False) if as_json else "\n".join(lines(summary)))
