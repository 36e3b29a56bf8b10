"""One benchmark run from beginning to end: target, load, summary, files. Shared by both command lines."""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from delivery.bench.disturbance import DisturbanceWatch
from delivery.bench.load import Progress, Target, run_load
from delivery.bench.plan import check_lengths
from delivery.bench.workload import load_workload
from delivery.errors import DataError, UsageError
from delivery.gate.record import write_records
from delivery.gate.summary import GOODPUT_KEYS, summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from delivery.bench.workload import Workload
    from delivery.gate.record import RequestRecord

_EVERY_S = 0.5
_EVERY_LINE_S = 10.0
_SHOWN = (
    ("completed", "requests done", ""),
    ("failed", "requests failed", ""),
    ("duration", "duration", "s"),
    ("request_throughput", "requests", "/s"),
    ("request_goodput", "requests within limits", "/s"),
    ("output_throughput", "output tokens", "/s"),
    ("total_token_throughput", "tokens in and out", "/s"),
)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `deliver bench`; its help describes each."""

    target: str
    """An http(s) URL, or the path of an engine or model directory."""
    workload: str = "fixed"
    rate: float | None = None
    concurrency: int | None = None
    requests: int | None = None
    warmup: int | None = None
    seed: int | None = None
    goodput: Mapping[str, float] = field(default_factory=dict)
    device: str = "auto"
    model: str | None = None
    api_key: str | None = None
    prompts: Literal["text", "tokens"] = "text"
    out: Path | None = None


def run_bench(options: BenchOptions, progress: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    """Measure and summarise. With `out`, `records.jsonl` and `summary.json` are written there.

    Raises DataError `bench-all-failed` when no request was answered.
    """
    workload = _workload(options)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)  # told before, not after the measurement
    with open_target(options, workload) as (target, device):
        watch = DisturbanceWatch()
        records = run_load(target, workload, progress=progress)
        disturbance = watch.stop()
    summary: dict[str, Any] = {
        "workload": workload.name,
        "workload_digest": workload.digest,
        "target": options.target,
        **summarize(records, goodput=options.goodput),
    }
    if device:
        from delivery.bench.facts import facts

        summary |= {
            "facts": facts(device),
            "foreign_cpu_ratio": disturbance.foreign_cpu_ratio,
            "swapped_pages": disturbance.swapped_pages,
        }
    if options.out:
        _write(options.out, summary, records)
    if not summary["completed"]:
        raise DataError(
            "bench-all-failed",
            f"all {len(records)} requests failed",
            why=f"first: {records[0].error}",
            hint="look at the server's log",
        )
    return summary


@contextmanager
def open_target(options: BenchOptions, workload: Workload) -> Iterator[tuple[Target, str]]:
    """The target and the device that it runs on; "" for a URL, whose device is not known here.

    Raises UsageError `request-too-long` where the engine cannot hold a request of the workload.
    """
    if options.target.startswith(("http://", "https://")):
        from delivery.bench.url_target import UrlTarget

        server = UrlTarget(
            options.target, model=options.model, api_key=options.api_key, prompts=options.prompts
        )
        server.wait_until_ready(lambda text: print(text, file=sys.stderr, flush=True))
        yield server, ""
        return
    from delivery.bench.engine_target import EngineTarget
    from delivery.engine.core import EngineCore

    with EngineCore(options.target, device=options.device) as core:
        # Told before anything is measured: requests that are refused say nothing of an engine.
        most, hint = min(core.max_model_len, core.plan.kv_tokens), "another --workload, or a longer engine"
        check_lengths(workload, "the engine holds", most, hint)
        yield EngineTarget(core, core.config.vocab_size), core.device


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """`ttft:500` → {"ttft": 500.0}. Raises UsageError `bad-goodput`."""
    out = {}
    for text in given:
        name, _, value = text.partition(":")
        try:
            out[name] = float(value)
        except ValueError:
            out[name] = 0.0
        if name not in GOODPUT_KEYS or not 0 < out[name] < math.inf:
            raise UsageError(
                "bad-goodput",
                f"--goodput {text}",
                why=f"expected NAME:MILLISECONDS, where NAME is {', '.join(GOODPUT_KEYS)}",
                hint="--goodput ttft:500",
            )
    return out


def lines(summary: Mapping[str, Any]) -> list[str]:
    """The summary for a terminal."""
    out = [
        f"{title:<24}{summary[key]:>10.4g} {unit}".rstrip() for key, title, unit in _SHOWN if key in summary
    ]
    out.append(f"{'ms':<24}{'mean':>10}{'p50':>10}{'p95':>10}{'p99':>10}")
    for kind, title in (
        ("ttft", "time to first token"),
        ("tpot", "time per output token"),
        ("itl", "gap between chunks"),
        ("e2el", "end to end"),
        ("schedule_delay", "sender's delay"),
    ):
        values = [summary[f"{name}_{kind}_ms"] for name in ("mean", "p50", "p95", "p99")]
        out.append(f"{title:<24}" + "".join(f"{v:>10.4g}" for v in values))
    return out


class ProgressLine:
    """Progress on stderr: one line that is rewritten on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._last = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        last_one = progress.done == progress.total
        if not last_one and now - self._last < (_EVERY_S if self._terminal else _EVERY_LINE_S):
            return
        self._last = now
        failed = f", {progress.failed} failed" if progress.failed else ""
        text = f"{progress.done}/{progress.total} requests{failed}, {progress.elapsed_s:.1f} s"
        start, end = ("\r", "\n" if last_one else "") if self._terminal else ("", "\n")
        print(f"{start}{text}", end=end, file=self._stream, flush=True)


def _workload(options: BenchOptions) -> Workload:
    workload = load_workload(options.workload).with_arrival(
        rate=options.rate, concurrency=options.concurrency
    )
    given = {"requests": options.requests, "warmup": options.warmup, "seed": options.seed}
    return replace(workload, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]


def _write(folder: Path, summary: Mapping[str, Any], records: Sequence[RequestRecord]) -> None:
    write_records(folder / "records.jsonl", records)
    text = json.dumps(summary, indent=1, ensure_ascii=False)
    (folder / "summary.json").write_text(text + "\n", "utf-8")
