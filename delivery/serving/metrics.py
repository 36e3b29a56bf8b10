"""`/metrics`: the server's series, in a registry of their own so that two servers never mix."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from delivery.serving import metric_names as names

if TYPE_CHECKING:
    from delivery.engine.outputs import EngineStats
    from delivery.serving.messages import Outputs

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)


class ServerMetrics:
    """Every series of `metric_names`, labelled with the served model's name."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._seen_cancelled = 0
        self._seen_preemptions = 0
        self._running = self._gauge(names.REQUESTS_RUNNING, "Requests in the running batch")
        self._waiting = self._gauge(names.REQUESTS_WAITING, "Requests accepted and not yet scheduled")
        self._kv_usage = self._gauge(names.KV_USAGE_RATIO, "KV blocks in use over KV blocks")
        self._batch_usage = self._gauge(
            names.BATCH_TOKEN_USAGE_RATIO, "Tokens of the last step over max_num_batched_tokens"
        )
        self._weights = self._gauge(names.WEIGHTS_BYTES, "Bytes of weights on the device")
        self._kv_tokens = self._gauge(names.KV_TOKENS, "Tokens that the KV cache can hold")
        self._prompt_tokens = self._counter(names.PROMPT_TOKENS_TOTAL, "Prompt tokens of accepted requests")
        self._generation_tokens = self._counter(names.GENERATION_TOKENS_TOTAL, "Tokens generated")
        self._cancelled = self._counter(names.REQUESTS_CANCELLED_TOTAL, "Requests whose client went away")
        self._preemptions = self._counter(names.PREEMPTIONS_TOTAL, "Requests put back for want of KV blocks")
        self._ended = Counter(
            names.REQUESTS_TOTAL,
            "Requests ended",
            [names.LABEL_MODEL, names.LABEL_FINISH_REASON],
            registry=self.registry,
        )
        self._refused = Counter(
            names.REQUESTS_REFUSED_TOTAL,
            "Requests answered 4xx before they reached the engine",
            [names.LABEL_MODEL, names.LABEL_CODE],
            registry=self.registry,
        )
        self._ttft = self._histogram(names.TTFT_SECONDS, "Arrival to first token", _TTFT_BUCKETS)
        self._gap = self._histogram(names.INTER_TOKEN_SECONDS, "Gap between two chunks", _STEP_BUCKETS)
        self._step = self._histogram(names.DECODE_STEP_SECONDS, "One engine step with decodes", _STEP_BUCKETS)
        self._request = self._histogram(names.REQUEST_SECONDS, "Arrival to last token", _REQUEST_BUCKETS)

    def on_step(self, message: Outputs) -> None:
        """Take over what one engine step reported."""
        self.set_state(message.stats)
        tokens = sum(len(output.new_token_ids) for output in message.outputs)
        self._generation_tokens.inc(tokens)
        if tokens and message.stats.step_seconds > 0:
            self._step.observe(message.stats.step_seconds)

    def set_state(self, stats: EngineStats) -> None:
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._kv_usage.set(stats.kv_usage_ratio)
        self._batch_usage.set(stats.batch_token_usage_ratio)
        self._weights.set(stats.weights_bytes)
        self._kv_tokens.set(stats.kv_tokens)
        # The engine counts from its start; counters here take the difference.
        self._cancelled.inc(max(0, stats.cancelled - self._seen_cancelled))
        self._preemptions.inc(max(0, stats.preemptions - self._seen_preemptions))
        self._seen_cancelled, self._seen_preemptions = stats.cancelled, stats.preemptions

    def refused(self, code: str) -> None:
        self._refused.labels(self._model, code).inc()

    def accepted(self, prompt_tokens: int) -> RequestTimer:
        """Start the clock of one accepted request."""
        self._prompt_tokens.inc(prompt_tokens)
        return RequestTimer(self)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, [names.LABEL_MODEL], registry=self.registry).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, [names.LABEL_MODEL], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        labels = [names.LABEL_MODEL]
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry).labels(self._model)


class RequestTimer:
    """Times of one request, from its arrival at the server."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._start_s = time.perf_counter()
        self._last_s: float | None = None

    def chunk(self) -> None:
        """Tokens arrived."""
        now = time.perf_counter()
        if self._last_s is None:
            self._metrics._ttft.observe(now - self._start_s)
        else:
            self._metrics._gap.observe(now - self._last_s)
        self._last_s = now

    def end(self, finish_reason: str) -> None:
        self._metrics._request.observe(time.perf_counter() - self._start_s)
        self._metrics._ended.labels(self._metrics._model, finish_reason).inc()
