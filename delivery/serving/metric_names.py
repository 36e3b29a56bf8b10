"""Names of the metrics that the server exports on `/metrics`.

Constants only: the server registers these, and the alerts, the dashboard and the autoscaler of a
release query these, so that no query asks for a series that does not exist.
"""

from __future__ import annotations

from typing import Final

# Gauges
REQUESTS_RUNNING: Final = "deliver_requests_running"
"""Requests in the running batch."""
REQUESTS_WAITING: Final = "deliver_requests_waiting"
"""Queue length: requests accepted and not yet scheduled."""
KV_USAGE_RATIO: Final = "deliver_kv_usage_ratio"
"""KV blocks in use over KV blocks, 0 to 1."""
BATCH_TOKEN_USAGE_RATIO: Final = "deliver_batch_token_usage_ratio"
"""Tokens of the last step over `max_num_batched_tokens`, 0 to 1."""
GPU_BUSY_RATIO: Final = "deliver_gpu_busy_ratio"
"""The device's own utilisation counter (NVML), 0 to 1; absent on a CPU."""
WEIGHTS_BYTES: Final = "deliver_weights_bytes"
"""Bytes of weights held on the device."""
KV_TOKENS: Final = "deliver_kv_tokens"
"""Tokens that the KV cache can hold."""

# Counters
PROMPT_TOKENS_TOTAL: Final = "deliver_prompt_tokens_total"
"""Prompt tokens of accepted requests."""
GENERATION_TOKENS_TOTAL: Final = "deliver_generation_tokens_total"
"""Tokens generated."""
REQUESTS_TOTAL: Final = "deliver_requests_total"
"""Requests ended, by label `finish_reason`."""
REQUESTS_CANCELLED_TOTAL: Final = "deliver_requests_cancelled_total"
"""Requests cancelled or whose client went away."""
REQUESTS_REFUSED_TOTAL: Final = "deliver_requests_refused_total"
"""Requests answered 4xx before they reached the engine, by label `code`."""
PREEMPTIONS_TOTAL: Final = "deliver_preemptions_total"
"""Running requests put back for want of KV blocks."""

# Histograms, in seconds
TTFT_SECONDS: Final = "deliver_time_to_first_token_seconds"
"""Arrival to first token."""
INTER_TOKEN_SECONDS: Final = "deliver_inter_token_seconds"
"""Gap between two chunks of one request."""
DECODE_STEP_SECONDS: Final = "deliver_decode_step_seconds"
"""One engine step that carries decodes."""
REQUEST_SECONDS: Final = "deliver_request_seconds"
"""Arrival to last token."""

LABEL_MODEL: Final = "model"
"""Label on every series: the served model's name."""
LABEL_FINISH_REASON: Final = "finish_reason"
LABEL_CODE: Final = "code"
