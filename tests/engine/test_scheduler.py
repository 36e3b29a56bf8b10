"""The scheduler, with a model made of arithmetic: every request gets exactly its own tokens."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delivery.engine.block_pool import BlockPool
from delivery.engine.outputs import Admitted, ModelOutput, SchedulerOutput
from delivery.engine.request import Request, SamplingParams, Status
from delivery.engine.scheduler import Scheduler
from delivery.engine.scheduler_config import SchedulerConfig
from delivery.errors import UsageError


def next_token(tokens: list[int]) -> int:
    digest = hashlib.blake2b(repr(tokens).encode(), digest_size=2).digest()
    return int.from_bytes(digest, "big") % 50


def expected(prompt: list[int], count: int, eos: tuple[int, ...] = ()) -> list[int]:
    out: list[int] = []
    while len(out) < count:
        out.append(next_token(prompt + out))
        if out[-1] in eos:
            break
    return out


class Device:
    """An executor whose cache holds, per slot of a block, the whole text up to that token."""

    def __init__(self, num_blocks: int, block_size: int, slots: int) -> None:
        self.block_size = block_size
        self.cache: list[tuple[int, ...] | None] = [None] * (num_blocks * block_size)
        self.last_token = [-1] * slots
        self.blocks: dict[int, list[int]] = {}
        self.known: dict[int, Admitted] = {}
        self.steps: list[SchedulerOutput] = []

    def run(self, work: SchedulerOutput) -> ModelOutput:
        self.steps.append(work)
        for new in work.admitted:
            self.blocks[new.slot] = list(new.block_ids)
            self.known[new.slot] = new
        out = []
        for item in work.scheduled:
            blocks = self.blocks[item.slot]
            blocks += item.new_block_ids
            known = self.known[item.slot].token_ids
            text: tuple[int, ...] = ()
            if item.start:
                before = self.cache[self.place(blocks, item.start - 1)]
                assert before is not None
                assert len(before) == item.start
                text = before
                for position in range(item.start):  # all that attention would read
                    assert self.cache[self.place(blocks, position)] == text[: position + 1]
            for position in range(item.start, item.start + item.num_tokens):
                token = known[position] if position < len(known) else self.last_token[item.slot]
                text = (*text, token)
                self.cache[self.place(blocks, position)] = text
            if item.samples:
                self.last_token[item.slot] = next_token(list(text))
                out.append(self.last_token[item.slot])
        return ModelOutput(work.step, tuple(out))

    def place(self, blocks: list[int], position: int) -> int:
        return blocks[position // self.block_size] * self.block_size + position % self.block_size


class Engine:
    """Scheduler and device together; `depth` steps are in flight."""

    def __init__(
        self, *, num_blocks: int = 64, block_size: int = 4, depth: int = 1, eos: Any = (), **options: Any
    ) -> None:
        options = {
            "max_model_len": 200,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "wait_time_s": 0.0,
            **options,
        }
        self.config = SchedulerConfig(**options)
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.config, self.pool, eos)
        self.device = Device(num_blocks, block_size, self.config.max_num_seqs)
        self.depth = depth
        self.flying: deque[ModelOutput] = deque()
        self.now = 0.0
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    def add(
        self, name: str, prompt: list[int], max_tokens: int | None = 4, priority: int = 0, **sampling: Any
    ) -> Request:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)
        request = Request(name, prompt, params, priority)
        self.scheduler.add(request, self.now)
        self.tokens[name] = []
        return request

    def step(self) -> SchedulerOutput | None:
        self.now += 0.001
        work = self.scheduler.schedule(self.now)
        if work is not None:
            assert 0 < work.num_tokens <= self.config.max_num_batched_tokens
            assert len(work.scheduled) <= self.config.max_num_seqs
            slots = [item.slot for item in work.scheduled]
            assert len(set(slots)) == len(slots)
            self.flying.append(self.device.run(work))
        if len(self.flying) >= self.depth or (work is None and self.flying):
            for event in self.scheduler.update(self.flying.popleft()):
                self.tokens[event.request.request_id].append(event.token_id)
                if event.finish_reason:
                    self.reasons[event.request.request_id] = event.finish_reason
        self.pool.check_integrity()
        running = self.scheduler.running.values()
        assert self.pool.num_used == len({b for r in running for b in r.block_ids})
        return work

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_unfinished() and not self.flying:
                return
            self.step()
        raise AssertionError("requests did not finish")


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@given(
    requests=st.lists(
        st.tuples(prompts, st.integers(1, 14), st.sampled_from([-1, 0, 1])), min_size=1, max_size=8
    ),
    num_blocks=st.integers(12, 40),
    depth=st.sampled_from([1, 2]),
    budget=st.integers(1, 40),
    seqs=st.integers(1, 6),
    enable_prefill=st.booleans(),
    chunk=st.integers(1, 9),
    cancel=st.sets(st.integers(0, 7)),
)
@settings(max_examples=150, deadline=None)
def test_any_schedule_gives_every_request_its_own_tokens(
    requests: Any,
    num_blocks: int,
    depth: int,
    budget: int,
    seqs: int,
    enable_prefill: bool,
    chunk: int,
    cancel: set[int],
) -> None:
    engine = Engine(
        num_blocks=num_blocks,
        depth=depth,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        enable_prefill=enable_prefill,
        prefill_chunk=chunk,
        chunk_past=11,
    )
    for number, (prompt, count, priority) in enumerate(requests):
        engine.add(str(number), prompt, count, priority)
        engine.step()
        if number in cancel:
            engine.scheduler.abort(str(number))
    engine.run()
    for number, (prompt, count, _) in enumerate(requests):
        got = engine.tokens[str(number)]
        want = expected(prompt, count)
        assert got == (want[: len(got)] if number in cancel else want)
    assert engine.pool.num_used == 0
    assert len(engine.scheduler._free_slots) == seqs


def test_preemption_happens_and_changes_nothing() -> None:
    engine = Engine(num_blocks=10, block_size=4, depth=2)
    for name in "abc":
        engine.add(name, [ord(name)] * 9, 16)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    for name in "abc":
        assert engine.tokens[name] == expected([ord(name)] * 9, 16)


def test_the_lowest_priority_is_preempted_first() -> None:
    engine = Engine(num_blocks=13, block_size=4)
    low = engine.add("low", [1] * 9, 12, priority=1)
    engine.step()
    high = engine.add("high", [2] * 9, 12, priority=-1)
    other = engine.add("other", [3] * 9, 12, priority=0)
    engine.run()
    assert low.num_preemptions > 0
    assert high.num_preemptions == other.num_preemptions == 0


def test_shared_prefix_is_computed_once() -> None:
    engine = Engine()
    prefix = list(range(12))
    engine.add("a", [*prefix, 90], 3)
    engine.run()
    b = engine.add("b", [*prefix, 91], 3)
    engine.run()
    assert b.num_cached_tokens == 12
    assert engine.device.steps[3].scheduled[0].start == 12
    assert engine.tokens["b"] == expected([*prefix, 91], 3)


def test_same_prompt_in_one_step_is_computed_once() -> None:
    engine = Engine()
    engine.add("a", list(range(13)), 2)
    twin = engine.add("b", list(range(13)), 2)
    work = engine.step()
    assert work is not None
    assert [item.num_tokens for item in work.scheduled] == [13, 1]
    engine.run()
    assert twin.num_cached_tokens == 12
    assert engine.tokens["a"] == engine.tokens["b"] == expected(list(range(13)), 2)


def test_long_prompts_come_in_pieces() -> None:
    engine = Engine(prefill_chunk=5, chunk_past=12)
    engine.add("long", list(range(14)), 1)
    engine.add("short", list(range(50, 61)), 1)
    engine.run()
    sizes = [[item.num_tokens for item in work.scheduled] for work in engine.device.steps]
    assert sizes[0] == [5, 11]
    assert sizes[1:] == [[5], [4]]
    at_the_limit = Engine(prefill_chunk=5, chunk_past=12)
    at_the_limit.add("a", list(range(12)), 1)
    at_the_limit.run()
    assert [work.num_tokens for work in at_the_limit.device.steps] == [12]


def test_a_prompt_leaves_running_requests_the_blocks_of_their_next_step() -> None:
    engine = Engine(num_blocks=3, block_size=4)
    engine.add("running", [1, 2, 3, 4], 3)
    engine.step()  # its block is full, and a token was sampled
    engine.add("waiting", list(range(10, 17)), 1)
    engine.run()
    assert engine.scheduler.num_preemptions == 0
    assert engine.tokens["running"] == expected([1, 2, 3, 4], 3)
    assert engine.tokens["waiting"] == expected(list(range(10, 17)), 1)


def test_enable_prefill_fills_steps_with_prompts() -> None:
    for enable_prefill, first in ((True, [8]), (False, [1, 7])):
        engine = Engine(max_num_batched_tokens=8, enable_prefill=enable_prefill)
        engine.add("a", [1, 2], 9)
        engine.step()
        engine.add("b", list(range(20)), 2)
        work = engine.step()
        assert work is not None
        assert sorted(item.num_tokens for item in work.scheduled) == first


@pytest.mark.parametrize(
    ("wait_s", "expected"),
    [(0.0, "-d-d-d-d"), (0.1, "-d-d-d-d"), (0.3, "---d---d"), (9.0, "--------")],
)
def test_decodes_left_out_go_first_when_they_have_waited(wait_s: float, expected: str) -> None:
    engine = Engine(max_num_batched_tokens=8, decode_wait_s=wait_s)
    engine.add("a", [1, 2], 9)
    engine.step()
    engine.add("b", list(range(80)), 2)
    seen = ""
    for step in range(8):
        engine.now = step * 0.125
        work = engine.step()
        assert work is not None
        seen += "d" if any(item.num_tokens == 1 for item in work.scheduled) else "-"
    assert seen == expected


def test_requests_gather_until_the_wait_time_or_a_full_batch() -> None:
    engine = Engine(wait_time_s=0.005, max_num_batched_tokens=16)
    engine.add("a", [1] * 3)
    assert engine.step() is None
    engine.now = 0.0049
    work = engine.step()
    assert work is not None
    engine = Engine(wait_time_s=0.005, max_num_batched_tokens=16)
    engine.add("a", [1] * 3)
    engine.add("b", [2] * 13)
    work = engine.step()
    assert work is not None
    assert len(work.scheduled) == 2


def test_priority_orders_and_age_raises() -> None:
    engine = Engine(max_num_seqs=1, ageing_s=10.0)
    engine.add("old", [9], priority=1)
    engine.now = 19.0
    engine.add("urgent", [8], priority=-1)
    engine.add("normal", [7], priority=0)
    order = []
    while engine.scheduler.has_unfinished():
        work = engine.step()
        if work is not None and work.admitted:
            order.append(work.admitted[0].request_id)
    assert order == ["urgent", "old", "normal"]


def test_cancel_frees_blocks_at_once() -> None:
    engine = Engine(depth=2)
    engine.add("a", list(range(30)), 9)
    engine.add("b", [5] * 3, 3)
    engine.step()
    used = engine.pool.num_used
    assert engine.scheduler.abort("a")
    assert engine.pool.num_used == used - 8
    assert not engine.scheduler.abort("a")
    assert engine.scheduler.num_cancelled == 1
    engine.run()
    assert engine.tokens["b"] == expected([5] * 3, 3)


def test_adaptive_budget() -> None:
    engine = Engine(max_num_batched_tokens=8192, adaptive=True)
    budget = engine.scheduler.budget
    for number, (length, tokens) in enumerate(
        [(3, 8192), (20, 8192), (15, 8192), (3, 2048), (31, 2048), (3, 2048), (32, 8192), (3, 8192)]
    ):
        engine.add(str(number), [1] * length)
        assert budget.tokens == tokens, f"after request {number} of {length} tokens"


def test_stop_tokens_and_min_tokens() -> None:
    prompt = [1, 2, 3]
    free = expected(prompt, 12)
    eos = free[2]
    engine = Engine(eos=(eos,))
    engine.add("eos", prompt, 12)
    engine.add("ignored", prompt, 12, ignore_eos=True)
    engine.add("stop", prompt, 12, stop_token_ids=(free[1],))
    engine.add("enough", prompt, 12, min_tokens=3)
    engine.add("too-few", prompt, 12, min_tokens=4, stop_token_ids=(free[4],))
    engine.run()
    assert engine.tokens["eos"] == engine.tokens["enough"] == expected(prompt, 12, (eos,)) == free[:3]
    assert engine.tokens["too-few"] == free[:5]
    assert engine.tokens["stop"] == free[:2]
    ended = {"eos": "stop", "ignored": "length", "stop": "stop", "enough": "stop", "too-few": "stop"}
    assert engine.reasons == ended
    assert engine.tokens["ignored"] == free


def test_after_a_step_that_failed_no_prefix_is_shared_and_what_waits_stays() -> None:
    engine = Engine(max_num_seqs=1)
    lost = engine.add("lost", list(range(13)), 4)
    waits = engine.add("waits", list(range(13)), 2)
    engine.step()
    engine.scheduler.drop_work()
    engine.flying.clear()
    assert (lost.status, lost.finish_reason) == (Status.FINISHED, "abort")
    engine.run()
    assert waits.num_cached_tokens == 0  # nobody knows what the blocks of the failed step hold
    assert engine.tokens["waits"] == expected(list(range(13)), 2)


def test_finish_from_outside_ends_a_request() -> None:
    engine = Engine()
    request = engine.add("a", [1, 2], 50)
    engine.step()
    engine.scheduler.finish("a", "stop")
    assert request.status is Status.FINISHED
    assert request.finish_reason == "stop"
    assert engine.pool.num_used == 0


@pytest.mark.parametrize(("prompt", "wanted"), [(190, 11), (200, None), (250, 1)])
def test_what_cannot_fit_the_session_is_refused_with_both_numbers(prompt: int, wanted: int | None) -> None:
    engine = Engine()
    with pytest.raises(
        UsageError, match=rf"{prompt} prompt tokens plus {wanted or 1} output.*is 200"
    ) as caught:
        engine.add("a", [1] * prompt, wanted)
    assert caught.value.code == "request-too-long"
    assert not engine.scheduler.has_unfinished()


def test_what_cannot_fit_the_cache_is_refused() -> None:
    engine = Engine(num_blocks=4, block_size=4)
    with pytest.raises(UsageError, match="the KV cache holds 16 tokens"):
        engine.add("a", [1] * 10, 7)
    engine.add("b", [1] * 10, 6)
    engine.run()
    assert len(engine.tokens["b"]) == 6


def test_open_end_takes_what_the_session_leaves() -> None:
    engine = Engine(max_model_len=20)
    engine.add("a", [1] * 15, None)
    engine.run()
    assert len(engine.tokens["a"]) == 5
    assert engine.reasons["a"] == "length"


def test_bad_requests_are_refused() -> None:
    engine = Engine()
    with pytest.raises(UsageError, match="no tokens"):
        engine.add("a", [])
    with pytest.raises(UsageError, match="priority is 3"):
        engine.add("a", [1], priority=3)
    engine.add("a", [1])
    with pytest.raises(UsageError, match="exists already"):
        engine.add("a", [1])


def test_rope_switch_rebuilds_the_cache_once() -> None:
    engine = Engine(rope_switch=10)
    request = engine.add("a", [1] * 8, 6)
    engine.run()
    assert engine.tokens["a"] == expected([1] * 8, 6)
    assert request.num_preemptions == 1
    starts = [w.scheduled[0].start for w in engine.device.steps]
    assert starts == [0, 8, 9, 0, 11, 12]
    assert request.long_rope


def test_sampling_params_name_the_field() -> None:
    for field, value in (
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("max_tokens", 0),
        ("stop", ("",)),
        ("logprobs", 99),
    ):
        with pytest.raises(UsageError, match=field):
            SamplingParams(**{field: value})
