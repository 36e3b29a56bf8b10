"""Metric names: the single list of what is measured, in which unit, and which direction is better.

Names are snake_case with the unit last. A metric kept per corpus is named `<corpus>_<name>`
(`english_perplexity`); `definition` knows both forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivery.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from delivery.gate.record import RequestRecord
    from delivery.gate.report import Direction


@dataclass(frozen=True, slots=True)
class MetricDef:
    """What a metric is. `floor` is the difference, in its unit, that is too small to matter."""

    name: str
    unit: str
    direction: Direction
    title: str
    floor: float = 0.0
    per_corpus: bool = False


_LATENCY_TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "e2e": "End to end",
    "itl": "Gap between chunks",
}
_FLOORS_MS = {"ttft": 5.0, "tpot": 0.5, "e2e": 20.0, "itl": 0.5}


def _latency() -> list[MetricDef]:
    return [
        MetricDef(f"{kind}_p{p}_ms", "ms", "lower", f"{title}, P{p}", floor=_FLOORS_MS[kind])
        for kind, title in _LATENCY_TITLES.items()
        for p in (50, 95, 99)
    ]


_DEFINITIONS = [
    *_latency(),
    MetricDef("schedule_delay_p50_ms", "ms", "lower", "Sender's delay, median"),
    MetricDef("request_throughput", "req/s", "higher", "Requests per second"),
    MetricDef("request_capacity", "req/s", "higher", "Requests per second that can be sustained"),
    MetricDef("output_throughput", "tok/s", "higher", "Output tokens per second"),
    MetricDef("request_goodput", "req/s", "higher", "Requests per second within the limits"),
    MetricDef("failed_requests_ratio", "ratio", "lower", "Share of failed requests"),
    MetricDef("weights_bytes", "bytes", "both", "Weights"),
    MetricDef("peak_bytes", "bytes", "both", "Activation peak"),
    MetricDef("overhead_bytes", "bytes", "both", "Graphs and libraries"),
    MetricDef("kv_bytes", "bytes", "both", "KV cache"),
    MetricDef("kv_tokens", "tokens", "both", "KV cache, tokens"),
    MetricDef("process_bytes", "bytes", "both", "Process memory"),
    MetricDef("memory_drift_ratio", "ratio", "lower", "Memory drift under steady load"),
    MetricDef("bits_per_weight", "bits", "both", "Bits per quantised weight"),
    MetricDef("perplexity", "ppl", "lower", "Perplexity", per_corpus=True),
    MetricDef("source_perplexity", "ppl", "lower", "Perplexity of the source", per_corpus=True),
    MetricDef("perplexity_ratio", "ratio", "lower", "Perplexity against the source", per_corpus=True),
    MetricDef("kl_nats", "nats", "lower", "KL divergence from the source", per_corpus=True),
    MetricDef("kl_early_nats", "nats", "lower", "KL divergence before token 128", per_corpus=True),
    MetricDef("kl_late_nats", "nats", "lower", "KL divergence from token 128 on", per_corpus=True),
    MetricDef("top1_agreement_ratio", "ratio", "higher", "Top-1 agreement with the source", per_corpus=True),
    MetricDef("top1_early_ratio", "ratio", "higher", "Top-1 agreement before token 128", per_corpus=True),
    MetricDef("top1_late_ratio", "ratio", "higher", "Top-1 agreement from token 128 on", per_corpus=True),
    MetricDef("bleu4_ratio", "ratio", "higher", "BLEU-4 of long greedy outputs against the source"),
    MetricDef("garbled_ratio", "ratio", "lower", "Share of garbled continuations", per_corpus=True),
    MetricDef("accuracy_ratio", "ratio", "higher", "Accuracy of labelled tasks", per_corpus=True),
    MetricDef("smoke_failed_prompts", "prompts", "lower", "Prompts that broke an expectation"),
    MetricDef("smoke_garbled_outputs", "outputs", "lower", "Garbled outputs"),
    MetricDef("smoke_looping_outputs", "outputs", "lower", "Outputs that repeat themselves"),
    MetricDef("smoke_unstopped_outputs", "outputs", "lower", "Outputs that never end their turn"),
    MetricDef("smoke_open_turns", "turns", "lower", "Turns that the chat template does not end"),
    MetricDef("smoke_leaked_markers", "outputs", "lower", "Outputs with markers of the chat template"),
    MetricDef("smoke_greedy_agreement_ratio", "ratio", "higher", "Greedy tokens equal to the source's"),
    MetricDef("smoke_perplexity", "ppl", "lower", "Perplexity of the suite's reference text"),
    MetricDef("smoke_p50_ms", "ms", "lower", "Ten smoke runs, P50"),
    MetricDef("smoke_p95_ms", "ms", "lower", "Ten smoke runs, P95"),
    MetricDef("load_s", "s", "lower", "Seconds to load the engine"),
    MetricDef("self_test_missed", "cases", "lower", "Planted regressions that the gate missed"),
    MetricDef("planned_bytes", "bytes", "both", "Memory that the engine planned"),
]
METRICS = {d.name: d for d in _DEFINITIONS}

UNDER_LOAD = frozenset(
    {
        *(d.name for d in _latency() if not d.name.startswith("itl")),
        *("schedule_delay_p50_ms", "request_throughput", "request_capacity", "output_throughput"),
        *("failed_requests_ratio", "weights_bytes", "peak_bytes", "overhead_bytes", "memory_drift_ratio"),
    }
)
"""Metrics that compare measures and can limit: all that an `slo` can name."""
NEVER_BOUNDED = frozenset(
    {
        *(d.name for d in _latency() if d.name.startswith("itl")),
        *("request_goodput", "kv_bytes", "kv_tokens", "bits_per_weight", "self_test_missed"),
    }
)
"""Metrics that no check enforces: a limit on one of these would have no effect."""

DEFAULT_FAMILY = ("ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms")
"""Latency metrics that are gated together unless the pipeline declares others."""


def corpus_metric(corpus: str, name: str) -> str:
    """`<corpus>_<name>`, with the corpus name reduced to letters, digits and underscores."""
    words = "".join(c if c.isalnum() else " " for c in corpus.lower()).split()
    return "_".join([*words, name])


def definition(name: str) -> MetricDef:
    """The definition behind a metric's name, per corpus or not. Raises UsageError `unknown-metric`."""
    if name in METRICS:
        return METRICS[name]
    behind = [d for d in _DEFINITIONS if d.per_corpus and name.endswith(f"_{d.name}")]
    if behind:
        return max(behind, key=lambda d: len(d.name))
    raise UsageError("unknown-metric", f"there is no metric {name!r}", hint=did_you_mean(name, METRICS))


def latency_kind(name: str) -> tuple[str, float]:
    """('tpot', 95.0) for 'tpot_p95_ms'.

    Raises UsageError `metric-not-gated` for an inter-token gap, `unknown-metric` for anything else.
    """
    kind, _, rest = name.partition("_p")
    if kind == "itl":
        raise UsageError(
            "metric-not-gated",
            f"{name} cannot be gated",
            why="the gap between chunks measures how often the server flushes",
            hint=f"gate on tpot_p{rest}",
        )
    if kind in _LATENCY_TITLES and name in METRICS:
        return kind, float(rest[:-3])
    known = [n for n in METRICS if n.partition("_p")[0] in ("ttft", "tpot", "e2e")]
    raise UsageError(
        "unknown-metric", f"{name!r} is not a latency metric of a request", hint=did_you_mean(name, known)
    )


def sample(record: RequestRecord, kind: str) -> float | None:
    """The latency `kind` ('ttft', 'tpot' or 'e2e') of one request in ms."""
    if kind == "ttft":
        return record.ttft_ms
    return record.tpot_ms if kind == "tpot" else record.e2e_ms
