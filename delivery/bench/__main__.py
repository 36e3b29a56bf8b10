"""`python -m delivery.bench`: the load generator on a host without the rest of deliver's dependencies."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from delivery.bench.run import BenchOptions, ProgressLine, lines, parse_goodput, run_bench
from delivery.errors import DeliverError


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m delivery.bench", description="Load an engine or a URL.")
    parser.add_argument("target", help="http(s) URL, or an engine or model directory")
    parser.add_argument("--workload", default="fixed", metavar="NAME|FILE")
    parser.add_argument("--rate", type=float, help="requests/s, Poisson")
    parser.add_argument("--concurrency", type=int, help="requests in flight")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--goodput", action="append", default=[], metavar="ttft|tpot|e2el:MS")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--model")
    parser.add_argument("--prompts", default="text", choices=("text", "tokens"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    given = vars(parser.parse_args(arguments))
    as_json = given.pop("json")
    try:
        given["goodput"] = parse_goodput(given["goodput"])
        options = BenchOptions(**given, api_key=os.environ.get("OPENAI_API_KEY"))
        summary = run_bench(options, ProgressLine())
    except DeliverError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    print(json.dumps(summary) if as_json else "\n".join(lines(summary)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
