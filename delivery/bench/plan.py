"""From a workload to the requests of one run: lengths, token ids or words, and arrival times.

Lengths and arrivals are the same in every run of a workload, tokens are not: otherwise the second run
would find its prompts in a prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from delivery.bench.words import WORDS
from delivery.bench.workload import read_trace
from delivery.errors import UsageError

if TYPE_CHECKING:
    from delivery.bench.workload import Workload

_LENGTHS, _ARRIVALS, _TOKENS = 0, 1, 2
BLOCK_SIZE = 64
_IN_FLIGHT = 64
WARMUP_RUN, PROBE_RUN = 1 << 20, 1 << 21
"""Numbers of the runs whose tokens a warm-up and a probe use: no measured run has them."""
_BUSIEST = 0.25


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: due `due_s` after the start (None in a closed loop), its lengths and token numbers."""

    id: str
    due_s: float | None
    output_tokens: int
    numbers: tuple[int, ...]
    """One number per prompt token, 0 … 2³¹; a target maps them onto its vocabulary or onto words."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.numbers)

    def token_ids(self, vocab_size: int) -> list[int]:
        """Ids from the middle of the vocabulary, where no special tokens are."""
        low, high = vocab_size // 20, max(vocab_size - vocab_size // 20, vocab_size // 20 + 1)
        return [low + n % (high - low) for n in self.numbers]

    def text(self) -> str:
        """Common words, about one token each in any tokenizer."""
        return " ".join(WORDS[n % len(WORDS)] for n in self.numbers)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The requests of one run in order of arrival; `concurrency` is 0 in an open loop."""

    requests: tuple[PlannedRequest, ...]
    concurrency: int


def plan(workload: Workload, run: int = 0) -> LoadPlan:
    """The requests of run number `run`; the same arguments give the same plan everywhere."""
    lengths = _lengths(workload)
    due = arrivals(workload)
    tokens = np.random.default_rng([workload.seed, _TOKENS, run])
    prefixes = [
        tokens.integers(0, 1 << 31, workload.shape.prefix_tokens) for _ in range(workload.shape.prefixes)
    ]
    made = []
    for number, (prompt, output) in enumerate(lengths):
        own = tokens.integers(0, 1 << 31, prompt)
        if prefixes:
            own = np.concatenate([prefixes[number % len(prefixes)], own])
        made.append(
            PlannedRequest(
                id=f"r{number}",
                due_s=None if due is None else due[number],
                output_tokens=output,
                numbers=tuple(own.tolist()),
            )
        )
    concurrency = workload.arrival.concurrency if workload.arrival.kind == "closed" else 0
    return LoadPlan(tuple(made), concurrency)


def warmup_plan(workload: Workload) -> LoadPlan:
    """The first `warmup` requests as a closed loop, with tokens of their own."""
    whole = plan(workload, WARMUP_RUN)
    first = tuple(
        PlannedRequest(f"warm{r.id}", None, r.output_tokens, r.numbers)
        for r in whole.requests[: workload.warmup]
    )
    return LoadPlan(first, whole.concurrency or min(8, max(1, len(first))))


def probe_levels(workload: Workload) -> tuple[int, ...]:
    """Requests in flight at which a capacity is looked for, rising: as many as an engine has room for, and
    on for as long as half of the workload's requests can be in flight.
    """
    first = max(1, min(_IN_FLIGHT, workload.requests // 2))
    levels = [first]
    while 4 * levels[-1] <= workload.requests:
        levels.append(2 * levels[-1])
    return tuple(levels)


def probe_plan(workload: Workload, in_flight: int) -> LoadPlan:
    """A closed loop of twice as many requests as are in flight, each kind in its share.

    They are picked evenly from the workload's requests in order of size, and sent in their own order.
    """
    whole = plan(workload, PROBE_RUN).requests
    count = min(2 * in_flight, len(whole))
    by_size = sorted(range(len(whole)), key=lambda i: (whole[i].output_tokens, whole[i].prompt_tokens))
    picked = sorted(by_size[int((i + 0.5) * len(whole) / count)] for i in range(count))
    chosen = (whole[i] for i in picked)
    return LoadPlan(
        tuple(PlannedRequest(f"probe{r.id}", None, r.output_tokens, r.numbers) for r in chosen), in_flight
    )


def offered_rate(workload: Workload) -> float | None:
    """Requests/s that an open loop asks where it asks most; None for a closed loop.

    For a ramp that is its faster end, for a trace the busiest quarter of its requests.
    """
    arrival = workload.arrival
    if arrival.kind == "closed":
        return None
    if arrival.kind != "trace":
        return max(arrival.rate, arrival.rate_end if arrival.kind == "ramp" else 0.0)
    due = arrivals(workload) or []
    step = max(1, int(len(due) * _BUSIEST))
    spans = [later - sooner for sooner, later in zip(due, due[step:], strict=False)]
    return step / max(min(spans, default=0.0), 1e-9)


def first_use() -> LoadPlan:
    """One short request, so that kernels are compiled before memory is looked at."""
    return LoadPlan((PlannedRequest("first", None, 2, tuple(range(4))),), concurrency=1)


def engine_options(workload: Workload, kv_tokens: int = 0) -> dict[str, int]:
    """Engine options that reserve `kv_tokens`; 0 for twice what can be in flight at once.

    Two engines are compared at an equal number of KV tokens, whatever memory happens to be free.
    """
    if not kv_tokens:
        load = plan(workload)
        longest = sum(longest_request(workload))
        at_once = load.concurrency or min(_IN_FLIGHT, len(load.requests))
        kv_tokens = -(-longest // BLOCK_SIZE) * BLOCK_SIZE * at_once * 2
    return {"cache_max_entry_count": -(-kv_tokens // BLOCK_SIZE), "block_size": BLOCK_SIZE}


def check_lengths(workload: Workload, holder: str, most: int, hint: str = "") -> None:
    """Every request is one that an engine can run. holder: what bounds its tokens, in words; most: the bound.

    Raises UsageError `request-too-long`.
    """
    prompt, output = longest_request(workload)
    if prompt + output > most:
        raise UsageError(
            "request-too-long",
            f"a request of the workload {workload.name} cannot fit",
            why=f"{prompt} prompt tokens and {output} output tokens; {holder} {most}",
            hint=hint or "another --workload, or an engine built with a larger --max-session-len",
        )


def longest_request(workload: Workload) -> tuple[int, int]:
    """(prompt tokens, output tokens) of the request that has most of both together."""
    prefix = workload.shape.prefix_tokens if workload.shape.prefixes else 0
    return max(((p + prefix, o) for p, o in _lengths(workload)), key=sum)


def arrivals(workload: Workload) -> list[float] | None:
    """Seconds after the start at which each request is due; None in a closed loop."""
    arrival, count = workload.arrival, workload.requests
    if arrival.kind == "closed":
        return None
    if arrival.kind == "trace":
        return [at / arrival.speed for at, _, _ in _cycled(workload)]
    index = np.arange(count, dtype=np.float64)
    if arrival.kind == "constant":
        return [float(i) / arrival.rate for i in index]
    if arrival.kind == "poisson":
        gaps = np.random.default_rng([workload.seed, _ARRIVALS]).exponential(1.0 / arrival.rate, count)
        return [float(t) for t in np.cumsum(gaps) - gaps[0]]
    # The number of arrivals by time t is r0·t + (r1 − r0)·t² / 2T; solved for t.
    slope = (arrival.rate_end**2 - arrival.rate**2) / (2.0 * count)
    if abs(slope) < 1e-12:
        return [float(i) / arrival.rate for i in index]
    root = np.sqrt(arrival.rate**2 + 2.0 * slope * index)
    return [float(t) for t in (root - arrival.rate) / slope]


def _lengths(workload: Workload) -> list[tuple[int, int]]:
    shape = workload.shape
    if shape.kind == "trace":
        return [(tokens_in, tokens_out) for _, tokens_in, tokens_out in _cycled(workload)]
    if shape.kind != "mixed":
        return [(shape.prompt_tokens, shape.output_tokens)] * workload.requests
    rng = np.random.default_rng([workload.seed, _LENGTHS])
    # Exact shares in random order: a share that is only drawn would differ from run to run.
    edges = np.round(np.cumsum([c.share for c in shape.classes]) * workload.requests)
    classes = np.searchsorted(edges, np.arange(workload.requests), side="right")
    rng.shuffle(classes)
    out = []
    for which in classes:
        one = shape.classes[min(int(which), len(shape.classes) - 1)]
        prompt = int(rng.integers(one.prompt_tokens[0], one.prompt_tokens[1] + 1))
        output = int(rng.integers(one.output_tokens[0], one.output_tokens[1] + 1))
        out.append((prompt, output))
    return out


def _cycled(workload: Workload) -> list[tuple[float, int, int]]:
    """The trace, started again from its end as often as the number of requests asks for."""
    rows = read_trace(workload.trace_path)
    span = rows[-1][0] + (rows[-1][0] / max(len(rows) - 1, 1) or 1.0)
    return [
        (rows[i % len(rows)][0] + span * (i // len(rows)), *rows[i % len(rows)][1:])
        for i in range(workload.requests)
    ]
