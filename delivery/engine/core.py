"""EngineCore: requests in, outputs out. One object that a server process or a loop can drive.

Not thread-safe: one thread adds, aborts and steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from delivery.engine.assemble import assemble, options_for
from delivery.engine.block_pool import BlockPool
from delivery.engine.executor import Executor, InProcess, Pending
from delivery.engine.outputs import EngineStats, ModelOutput, RequestOutput, SchedulerOutput, TokenLogprobs
from delivery.engine.request import Request, SamplingParams
from delivery.engine.scheduler import Scheduler, TokenEvent
from delivery.engine.scheduler_config import SchedulerConfig
from delivery.engine.stopping import OutputText
from delivery.errors import EnvironmentLacking, UsageError

__all__ = ["EngineCore", "EngineStats", "Request", "RequestOutput", "SamplingParams", "TokenLogprobs"]

_LONGEST_NAP_S = 0.001


class EngineCore:
    """An engine over an engine directory, a quantised checkpoint or a plain Hugging Face directory.

    options: the fields of `EngineOptions`. Raises UsageError for an unknown or impossible option,
    DataError for a damaged path, EnvironmentLacking when it does not fit.
    """

    def __init__(self, path: Path | str, **options: Any) -> None:
        self.options = options_for(Path(path), options)
        made = assemble(Path(path), self.options)
        self.config = made.config
        self.plan = made.plan
        self.device = made.device
        self.tokenizer = made.tokenizer
        # A generation config may name what the model has no logit for.
        self.eos_token_ids = tuple(t for t in made.eos_token_ids if 0 <= t < made.config.vocab_size)
        self.max_model_len = made.plan.max_model_len
        self._runner = made.runner
        self._executor: Executor = InProcess(made.runner)
        self._closed = False
        # A prefix's keys can be shared; the state behind it would have to be kept for every block.
        shared = self.options.prefix_cache and made.config.delta is None
        pool = BlockPool(made.plan.num_blocks, made.plan.block_size, prefix_cache=shared)
        limits = SchedulerConfig(
            max_model_len=self.max_model_len,
            max_num_seqs=self.options.sequences(made.device),
            max_num_batched_tokens=self.options.batched_tokens(made.device),
            wait_time_s=self.options.wait_time_ms / 1000,
            ageing_s=self.options.ageing_s,
            enable_prefill=self.options.enable_prefill,
            adaptive=self.options.adaptive,
            rope_switch=made.runner.rotary.switch,
        )
        self.scheduler = Scheduler(limits, pool, self.eos_token_ids)
        self._texts: dict[str, OutputText] = {}
        self._with_history: set[str] = set()
        self._in_flight: deque[tuple[SchedulerOutput, Pending]] = deque()
        self._steps = self._prompt_tokens = self._output_tokens = 0
        self._last_tokens = 0
        self._scoring = False
        self._last_seconds = 0.0

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises UsageError when it can never run, or the engine is closed."""
        self._check_open()
        if request.sampling.stop and self.tokenizer is None:
            raise UsageError(
                "request-invalid",
                f"request {request.request_id} cannot be run",
                why="it has stop strings, and the model's directory has no tokenizer",
            )
        sampling = request.sampling
        named = (*request.prompt_token_ids, *sampling.stop_token_ids, *sampling.logit_bias)
        self._check_vocabulary(named, f"request {request.request_id} cannot be run")
        self.scheduler.add(request, time.monotonic())
        if request.sampling.needs_history:
            self._with_history.add(request.request_id)
        if self.tokenizer is not None:
            detokenizer = self.tokenizer.incremental(request.prompt_token_ids)
            self._texts[request.request_id] = OutputText(detokenizer, sampling.stop, sampling.min_tokens)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks at once; nothing happens when it has ended."""
        if self.scheduler.abort(request_id):
            self._forget(request_id)

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """Run one step and return what it, or the one before it, gave. Naps for at most 1 ms when requests
        wait for others to join them. When it fails, or is interrupted, the requests that ran end with it
        and the engine remains usable for others."""
        try:
            return self._step()
        except BaseException:
            self._in_flight.clear()
            self.scheduler.drop_work()
            for request_id in self._texts.keys() | self._with_history:
                if request_id not in self.scheduler.requests:
                    self._forget(request_id)
            raise

    def _step(self) -> list[RequestOutput]:
        started = time.perf_counter()
        outputs: list[RequestOutput] = []
        while self._in_flight and not self._with_history.isdisjoint(self.scheduler.running):
            outputs += self._collect()  # penalties need every token before the next one is sampled
        work = self.scheduler.schedule(time.monotonic())
        if work is not None:
            self._in_flight.append((work, self._executor.submit(work)))
            self._steps += 1
            self._last_tokens = work.num_tokens
            self._prompt_tokens += sum(s.num_tokens for s in work.scheduled if s.num_output == 0)
        elif not self._in_flight:
            wait_s = self.scheduler.opens_at() - time.monotonic()
            if self.scheduler.has_unfinished() and wait_s > 0:
                time.sleep(min(wait_s, _LONGEST_NAP_S))
            return outputs
        if len(self._in_flight) >= self._executor.depth or work is None:
            outputs += self._collect()
        self._last_seconds = time.perf_counter() - started
        return outputs

    def _collect(self) -> list[RequestOutput]:
        _, pending = self._in_flight.popleft()
        output: ModelOutput = pending.result()
        return [self._output(event) for event in self.scheduler.update(output)]

    def _output(self, event: TokenEvent) -> RequestOutput:
        request, reason = event.request, event.finish_reason
        text = ""
        self._output_tokens += 1
        written = self._texts.get(request.request_id)
        if written is not None:
            # An end-of-text token ends the text before it; a stop token too.
            ends = reason == "stop"
            text = "" if ends else written.push(event.token_id)
            if written.stopped and reason != "stop":
                reason = "stop"
                self.scheduler.finish(request.request_id, "stop")
            elif reason is not None:
                text += written.finish()
        if reason is not None:
            self._forget(request.request_id)
        return RequestOutput(
            request_id=request.request_id,
            new_token_ids=[event.token_id],
            new_text=text,
            finish_reason=reason,
            logprobs=None if event.logprobs is None else [event.logprobs],
            num_cached_tokens=request.num_cached_tokens,
        )

    def _forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)
        self._with_history.discard(request_id)

    def prompt_logits(self, token_ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """Logits [n, V] of every token of a sequence, in pieces. Its blocks are freed when the iterator
        ends or is closed; until then no other sequence can be scored. Raises UsageError `request-too-long`
        or `request-invalid`, EnvironmentLacking `kv-exhausted`."""
        self._check_open()
        if self._scoring:
            raise UsageError(
                "request-invalid",
                "the sequence cannot be scored",
                why="the logits of another one have not been read to their end",
                hint="read them to the end, or close() their iterator",
            )
        self._check_vocabulary(token_ids, "the sequence cannot be scored")
        pool = self.scheduler.pool
        if len(token_ids) > self.max_model_len:
            raise UsageError(
                "request-too-long",
                "the sequence cannot fit",
                why=f"{len(token_ids)} tokens; max_model_len is {self.max_model_len}",
            )
        blocks = pool.allocate(pool.blocks_for(len(token_ids)))
        if blocks is None:
            raise EnvironmentLacking(
                "kv-exhausted",
                "no room to score a sequence",
                why=f"{len(token_ids)} tokens need {pool.blocks_for(len(token_ids))} blocks, "
                f"{pool.num_free} are free",
                hint="wait for running requests to end",
            )
        self._scoring = True
        try:
            piece = min(self.options.batched_tokens(self.device), 512)
            yield from self._runner.prompt_logits(token_ids, blocks, piece)
        finally:
            self._scoring = False
            pool.free(blocks)

    def stats(self) -> EngineStats:
        pool, scheduler, plan = self.scheduler.pool, self.scheduler, self.plan
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage_ratio=pool.num_used / pool.num_blocks,
            batch_token_usage_ratio=self._last_tokens / scheduler.budget.tokens,
            step_seconds=self._last_seconds,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            preemptions=scheduler.num_preemptions,
            cancelled=scheduler.num_cancelled,
            finished=scheduler.num_finished,
            weights_bytes=plan.weights_bytes,
            peak_bytes=plan.peak_bytes,
            overhead_bytes=plan.overhead_bytes + plan.state_bytes,
            kv_bytes=plan.kv_bytes,
            kv_tokens=plan.kv_tokens,
            max_model_len=plan.max_model_len,
            max_num_seqs=scheduler.config.max_num_seqs,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            adjacent_growth_ratio=pool.grown_adjacent / pool.grown if pool.grown else 0.0,
        )

    def _check_vocabulary(self, token_ids: Sequence[int], what: str) -> None:
        vocabulary = self.config.vocab_size
        if bad := [token for token in token_ids if not 0 <= token < vocabulary]:
            why = f"token id {bad[0]} is outside the vocabulary of {vocabulary}"
            raise UsageError("request-invalid", what, why=why)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("engine-closed", "the engine is closed", why="its memory has been freed")

    def close(self) -> None:
        """End everything and free the weights and the cache; the engine cannot be used afterwards."""
        for request_id in list(self.scheduler.requests):
            self.abort(request_id)
        while self._in_flight:
            self._collect()
        if not self._closed:
            self._closed = True
            self._executor.close()
            del self._executor, self._runner  # and with them what they hold, though this object stays

    def __enter__(self) -> EngineCore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
