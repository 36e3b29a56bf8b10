"""The servers that a release can run: how each is started, probed, and monitored.

Metric names are those that the server of that runtime exports; alerts, dashboard and autoscaler are
rendered from them, so that no query names a series of another runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivery.errors import UsageError, did_you_mean
from delivery.serving import metric_names as ours

if TYPE_CHECKING:
    from collections.abc import Mapping

MODEL_DIR = "/model"
API_KEYS_FILE = "/etc/deliver/api-keys/api-keys"


@dataclass(frozen=True, slots=True)
class Series:
    """Metric names by meaning; histograms are named without `_bucket`."""

    waiting: str
    running: str
    kv_usage: str
    generation_tokens: str
    prompt_tokens: str
    ttft_seconds: str
    inter_token_seconds: str
    decode_seconds: str
    request_seconds: str
    cancelled: str = ""
    preemptions: str = ""


@dataclass(frozen=True, slots=True)
class Runtime:
    """`serves` is the kind of directory it loads; `args` may hold {model}, {port}, {max_len}, {kv_blocks}.

    The defaults are what other servers than ours have in common.
    """

    kind: str
    port: int
    command: tuple[str, ...]
    args: tuple[str, ...]
    series: Series
    serves: str = "checkpoint"
    api_key_args: tuple[str, ...] = ("--api-key", "$(DELIVER_API_KEY)")
    """Arguments that switch authentication on; `$(DELIVER_API_KEY)` is expanded by the kubelet."""
    api_key_from_file: bool = False
    insecure_args: tuple[str, ...] = ()
    """Arguments that a server needs before it listens on every address without a key."""
    liveness_path: str = "/health"
    startup_path: str = "/health"
    """Answers 200 once the model is loaded."""
    ready_path: str = ""
    """Answers 200 while the model is served, without a key; empty: /v1/models is asked for the model."""
    drain_arg: str = ""
    """Option that takes the seconds which running requests get on SIGTERM; empty: it has none."""

    def arguments(self, model: str, max_model_len: int | None, kv_blocks: int | None) -> list[str]:
        """The command line for a model name; session length in tokens and KV blocks where they are known."""
        known: Mapping[str, object] = {
            "model": model,
            "port": self.port,
            "max_len": max_model_len or "",
            "kv_blocks": kv_blocks or "",
        }
        groups = ([word.format_map(known) for word in text.split(" ")] for text in self.args)
        return [word for group in groups if "" not in group for word in group]


_OURS = Series(
    waiting=ours.REQUESTS_WAITING,
    running=ours.REQUESTS_RUNNING,
    kv_usage=ours.KV_USAGE_RATIO,
    generation_tokens=ours.GENERATION_TOKENS_TOTAL,
    prompt_tokens=ours.PROMPT_TOKENS_TOTAL,
    ttft_seconds=ours.TTFT_SECONDS,
    inter_token_seconds=ours.INTER_TOKEN_SECONDS,
    decode_seconds=ours.DECODE_STEP_SECONDS,
    request_seconds=ours.REQUEST_SECONDS,
    cancelled=ours.REQUESTS_CANCELLED_TOTAL,
    preemptions=ours.PREEMPTIONS_TOTAL,
)


def _like_vllm(
    kind: str,
    *,
    waiting: str = "num_requests_waiting",
    running: str = "num_requests_running",
    kv_usage: str = "kv_cache_usage_perc",
    inter_token: str = "inter_token_latency_seconds",
    cancelled: str = "",
    preemptions: str = "",
) -> Series:
    """Series of a server that took over vLLM's names, with its own prefix and a few differences."""

    def own(name: str) -> str:
        return f"{kind}:{name}" if name else ""

    return Series(
        waiting=own(waiting),
        running=own(running),
        kv_usage=own(kv_usage),
        generation_tokens=own("generation_tokens_total"),
        prompt_tokens=own("prompt_tokens_total"),
        ttft_seconds=own("time_to_first_token_seconds"),
        inter_token_seconds=own(inter_token),
        decode_seconds=own(inter_token),
        request_seconds=own("e2e_request_latency_seconds"),
        cancelled=own(cancelled),
        preemptions=own(preemptions),
    )


_KNOWN = (
    Runtime(
        kind="deliver",
        port=23333,
        command=("deliver",),
        args=(
            f"serve {MODEL_DIR}",
            "--host 0.0.0.0",
            "--port {port}",
            "--model-name {model}",
            "--cache-max-entry-count {kv_blocks}",
        ),
        series=_OURS,
        serves="engine",
        api_key_args=("--api-key-file", API_KEYS_FILE),
        api_key_from_file=True,
        insecure_args=("--allow-unauthenticated",),
        startup_path="/ready",
        ready_path="/ready",
        drain_arg="--drain-timeout",
    ),
    Runtime(
        kind="vllm",
        port=8000,
        command=("vllm", "serve"),
        args=(
            MODEL_DIR,
            "--host 0.0.0.0",
            "--port {port}",
            "--served-model-name {model}",
            "--max-model-len {max_len}",
        ),
        series=_like_vllm("vllm", preemptions="num_preemptions_total"),
    ),
    Runtime(
        kind="lmdeploy",
        port=23333,
        command=("lmdeploy", "serve", "api_server"),
        args=(
            MODEL_DIR,
            "--server-name 0.0.0.0",
            "--server-port {port}",
            "--model-name {model}",
            "--session-len {max_len}",
        ),
        series=_like_vllm(
            "lmdeploy", kv_usage="gpu_cache_usage_perc", inter_token="time_per_output_token_seconds"
        ),
        api_key_args=("--api-keys", "$(DELIVER_API_KEY)"),
    ),
    Runtime(
        kind="sglang",
        port=30000,
        command=("python3", "-m", "sglang.launch_server"),
        args=(
            f"--model-path {MODEL_DIR}",
            "--host 0.0.0.0",
            "--port {port}",
            "--served-model-name {model}",
            "--context-length {max_len}",
            "--enable-metrics",
        ),
        series=_like_vllm(
            "sglang",
            waiting="num_queue_reqs",
            running="num_running_reqs",
            kv_usage="token_usage",
            cancelled="num_aborted_requests_total",
        ),
    ),
)
RUNTIMES: dict[str, Runtime] = {known.kind: known for known in _KNOWN}


def runtime(kind: str) -> Runtime:
    """The runtime called `kind`. Raises UsageError `unknown-runtime`."""
    if kind not in RUNTIMES:
        raise UsageError(
            "unknown-runtime", f"there is no runtime {kind!r}", hint=did_you_mean(kind, RUNTIMES)
        )
    return RUNTIMES[kind]
