"""Scheduler: which tokens of which requests each step computes. No torch, no clock of its own.

There is no prefill phase and no decode phase: a request has tokens, of which the first
`num_computed_tokens` are in the cache, and every step schedules some of the rest until it catches up
(continuous batching, Orca, OSDI 2022; chunked prefill, arXiv 2308.16369). Sampled tokens may be
reported a step late, so `num_pending` tokens follow the known ones.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from delivery.engine.block_pool import BlockPool
from delivery.engine.budget import TokenBudget
from delivery.engine.outputs import Admitted, ModelOutput, Scheduled, SchedulerOutput, TokenLogprobs
from delivery.engine.prefix import extend_hashes, publish
from delivery.engine.request import FinishReason, Request, Status
from delivery.engine.scheduler_config import SchedulerConfig
from delivery.engine.waiting import WaitingQueue
from delivery.errors import UsageError


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token that a request got; finish_reason when it ended the request."""

    request: Request
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class _Step:
    """A step while it is put together."""

    number: int
    budget: int
    admitted: list[Admitted] = field(default_factory=list)
    scheduled: list[Scheduled] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)


class Scheduler:
    """Owns the requests and the block pool. `schedule`, run the step, `update`; steps may overlap by one."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.config = config
        self.pool = pool
        self.eos_token_ids = eos_token_ids
        self.waiting = WaitingQueue(wait_time_s=config.wait_time_s, ageing_s=config.ageing_s)
        self.running: dict[str, Request] = {}
        self.budget = TokenBudget(config.max_num_batched_tokens, adaptive=config.adaptive)
        self.requests: dict[str, Request] = {}
        self.num_preemptions = self.num_cancelled = self.num_finished = 0
        self.num_cached_tokens = 0
        self._free_slots = list(range(config.max_num_seqs))
        self._in_flight: deque[tuple[int, list[Request]]] = deque()
        self._step = self._added = 0
        self._left_out_since_s: float | None = None

    # Requests come and go

    def add(self, request: Request, now_s: float) -> None:
        """Take a request. Raises UsageError when it can never run, with the numbers."""
        request.check()
        if request.request_id in self.requests:
            raise UsageError("request-duplicate", f"request {request.request_id} exists already")
        prompt, limit = len(request.prompt_token_ids), self.config.max_model_len
        room = min(limit, self.pool.num_blocks * self.pool.block_size) - prompt
        wanted = request.sampling.max_tokens
        if room < (1 if wanted is None else wanted):
            tokens = self.pool.num_blocks * self.pool.block_size
            raise UsageError(
                "request-too-long",
                f"request {request.request_id} cannot fit",
                why=f"{prompt} prompt tokens plus {wanted or 1} output tokens; "
                f"max_model_len is {limit}, the KV cache holds {tokens} tokens",
                hint="shorten the prompt, ask for fewer tokens, or raise --max-session-len",
            )
        request.max_tokens = room if wanted is None else wanted
        self._added += 1
        request.number = self._added
        request.arrival_s = now_s
        self.requests[request.request_id] = request
        self.waiting.add(request)
        self.budget.arrived(prompt)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks at once. False when it is not here (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, "abort")
        self.num_cancelled += 1
        return True

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request from outside: a stop string was found in its text."""
        if request := self.requests.get(request_id):
            self._finish(request, reason)
            self.num_finished += 1

    def drop_work(self) -> None:
        """A step failed, so nobody knows what the cache and the device hold of those that ran: they end,
        steps in flight are forgotten, and no prefix is shared any more. Waiting requests stay queued."""
        self._in_flight.clear()
        for request in list(self.requests.values()):
            if request.status is Status.RUNNING or request.num_pending:
                self.abort(request.request_id)
        self.pool.reset_cache()

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def opens_at(self) -> float:
        """When waiting requests will be admitted at the latest; +inf when none waits."""
        return self.waiting.opens_at(self.budget.tokens)

    # One step

    def schedule(self, now_s: float) -> SchedulerOutput | None:
        """The next step's work; None when there is nothing to run now."""
        step = _Step(self._step + 1, self.budget.tokens)
        decodes_first = not self.config.enable_prefill or self._stood_back(now_s)
        if decodes_first:
            self._decodes(step, now_s)
        self._prefills(step)
        self._admit(step, now_s)
        if not decodes_first:
            self._decodes(step, now_s)
        if not step.scheduled:
            return None
        self._step = step.number
        sampling = [r for r, s in zip(step.requests, step.scheduled, strict=True) if s.samples]
        self._in_flight.append((step.number, sampling))
        return SchedulerOutput(
            step=step.number,
            admitted=tuple(step.admitted),
            scheduled=tuple(step.scheduled),
            num_tokens=sum(s.num_tokens for s in step.scheduled),
            needs_history=any(r.sampling.needs_history for r in sampling),
        )

    def update(self, output: ModelOutput) -> list[TokenEvent]:
        """Take in a step's sampled tokens, oldest step first. Tokens of ended requests are discarded."""
        number, requests = self._in_flight.popleft()
        if number != output.step or len(requests) != len(output.token_ids):
            raise ValueError(f"output of step {output.step} does not answer step {number}")
        logprobs = output.logprobs or (None,) * len(requests)
        events = []
        for request, token, info in zip(requests, output.token_ids, logprobs, strict=True):
            if request.status is Status.FINISHED:
                continue
            waits = request.status is Status.PREEMPTED
            if waits:
                self.waiting.remove(request)
            request.num_pending -= 1
            request.output_token_ids.append(token)
            if waits:
                self.waiting.add(request)
            reason = self._reason_to_stop(request, token)
            if reason is not None:
                self._finish(request, reason)
                self.num_finished += 1
            events.append(TokenEvent(request, token, reason, info))
        return events

    def _reason_to_stop(self, request: Request, token: int) -> FinishReason | None:
        sampling, count = request.sampling, len(request.output_token_ids)
        if count >= sampling.min_tokens:
            ends = () if sampling.ignore_eos else self.eos_token_ids
            if token in ends or token in sampling.stop_token_ids:
                return "stop"
        return "length" if count >= request.max_tokens else None

    def _decodes(self, step: _Step, now_s: float) -> None:
        running = self.running.values()
        ready = [r for r in running if r.in_decode and not r.exhausted and r.last_step != step.number]
        if len(ready) > step.budget:
            ready.sort(key=lambda r: r.last_step)  # those that were left out last time
        elif self._growing() > self.pool.num_free:
            ready.sort(key=lambda r: self._rank(r, now_s))  # those that matter least come last, and go
        if len(ready) <= step.budget:
            self._left_out_since_s = None
        elif self._left_out_since_s is None:
            self._left_out_since_s = now_s
        for request in ready:
            if step.budget == 0:
                break
            if request.status is not Status.RUNNING:
                continue  # preempted for one before it
            if self._must_rebuild(request):
                self._preempt(request)
                continue
            grown = self._grow(request, step, now_s)
            if grown is not None:
                self._put(step, request, 1, grown)

    def _stood_back(self, now_s: float) -> bool:
        """Whether decodes have been left out for as long as they may be. A step with prompts is full, so
        decodes in it take the place of prompts; gathered for a while, more of them share a step's weights."""
        since_s = self._left_out_since_s
        return since_s is not None and now_s - since_s >= self.config.decode_wait_s

    def _grow(self, request: Request, step: _Step, now_s: float) -> tuple[int, ...] | None:
        """Blocks for one token more, at the cost of others if need be. None: it was preempted itself."""
        if request.num_computed_tokens < len(request.block_ids) * self.pool.block_size:
            return ()
        while (blocks := self.pool.allocate(1, after=request.block_ids[-1])) is None:
            victim = self._victim(step, now_s)
            self._preempt(victim)
            if victim is request:
                return None
        request.block_ids += blocks
        return tuple(blocks)

    def _victim(self, step: _Step, now_s: float) -> Request:
        """The running request that matters least: lowest priority, then latest arrival."""
        free = [r for r in self.running.values() if r.last_step != step.number]
        return max(free, key=lambda r: self._rank(r, now_s))

    def _rank(self, request: Request, now_s: float) -> tuple[int, float]:
        return self.waiting.level(request, now_s), request.arrival_s

    def _prefills(self, step: _Step) -> None:
        for request in self.running.values():
            if step.budget == 0:
                break
            if request.last_step != step.number and not request.in_decode and not request.exhausted:
                self._put(step, request, self._piece(request, step.budget), ())

    def _admit(self, step: _Step, now_s: float) -> None:
        if not self.waiting.is_open(now_s, self.budget.tokens):
            return
        reserve = self._growing()
        while step.budget and self._free_slots:
            request = self.waiting.first(now_s)
            # A preempted request whose last token is still being sampled comes a step later.
            if request is None or request.num_pending or not self._start(request, reserve):
                break
            step.admitted.append(
                Admitted(
                    slot=request.slot,
                    request_id=request.request_id,
                    token_ids=tuple(request.tokens()),
                    num_output=len(request.output_token_ids),
                    block_ids=tuple(request.block_ids),
                    sampling=request.sampling,
                    eos_token_ids=self.eos_token_ids,
                    number=request.number,
                )
            )
            self._put(step, request, self._piece(request, step.budget), ())

    def _start(self, request: Request, reserve: int) -> bool:
        """Give a waiting request its blocks and a slot; False when that would leave fewer than `reserve`."""
        switch = self.config.rope_switch
        request.long_rope = switch is not None and request.num_tokens > switch
        extend_hashes(request, self.pool)
        # The last token is always computed, since its logits are wanted.
        shared = self.pool.match(request.block_hashes[: (request.num_tokens - 1) // self.pool.block_size])
        wanted = self.pool.blocks_for(request.num_tokens) - len(shared)
        if self.running and self.pool.num_free < wanted + reserve:
            return False
        blocks = self.pool.allocate(wanted, share=shared)
        if blocks is None:
            return False
        self.waiting.remove(request)
        request.block_ids = blocks
        request.num_computed_tokens = len(shared) * self.pool.block_size
        request.num_published = len(shared)
        if not request.output_token_ids:
            request.num_cached_tokens = request.num_computed_tokens
        self.num_cached_tokens += request.num_computed_tokens
        request.slot = heapq.heappop(self._free_slots)
        request.status = Status.RUNNING
        self.running[request.request_id] = request
        return True

    def _growing(self) -> int:
        """Blocks that the running requests ask for in their next step: not to be given away before."""
        size = self.pool.block_size
        return sum(r.total_tokens >= len(r.block_ids) * size for r in self.running.values())

    def _piece(self, request: Request, budget: int) -> int:
        rest = request.total_tokens - request.num_computed_tokens
        if request.num_tokens > self.config.chunk_past:
            rest = min(rest, self.config.prefill_chunk)
        return min(rest, budget)

    def _put(self, step: _Step, request: Request, tokens: int, new_blocks: tuple[int, ...]) -> None:
        start = request.num_computed_tokens
        request.num_computed_tokens += tokens
        samples = request.num_computed_tokens == request.total_tokens
        num_output = len(request.output_token_ids) + request.num_pending
        step.scheduled.append(Scheduled(request.slot, start, tokens, new_blocks, samples, num_output))
        step.requests.append(request)
        step.budget -= tokens
        request.num_pending += samples
        request.last_step = step.number
        publish(request, self.pool)

    # Leaving

    def _must_rebuild(self, request: Request) -> bool:
        switch = self.config.rope_switch
        return switch is not None and not request.long_rope and request.total_tokens > switch

    def _preempt(self, request: Request) -> None:
        """Back to the queue with its tokens; its keys and values are computed again, or found cached."""
        self._release(request)
        if self._must_rebuild(request):
            request.block_hashes = []
        request.status = Status.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.RUNNING:
            self._release(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_ids)
        heapq.heappush(self._free_slots, request.slot)
        del self.running[request.request_id]
        request.block_ids = []
        request.num_computed_tokens = request.num_published = 0
        request.slot = -1
