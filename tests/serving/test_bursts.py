"""A burst of requests: what waits is bounded, also before the engine's first report of it."""

from __future__ import annotations

import asyncio

import pytest

from delivery.engine.outputs import EngineStats, RequestOutput
from delivery.engine.request import SamplingParams
from delivery.serving.engine_client import EngineClient
from delivery.serving.generation import Choice, Generator
from delivery.serving.messages import Outputs
from delivery.serving.metrics import ServerMetrics
from delivery.serving.problem import Problem


class StillEngine(EngineClient):
    """An engine of two places that reports only when told to."""

    def __init__(self) -> None:
        self.stats = EngineStats(max_num_seqs=2)
        self.failure = None
        self.reserved = 0
        self.on_step = lambda _outputs: None
        self._streams = {}

    def _send(self, message: object) -> None:
        pass

    def finish_all(self) -> None:
        ended = tuple(RequestOutput(name, [5], "x", "stop") for name in self._streams)
        self._take(Outputs(ended, EngineStats(max_num_seqs=2)))


def generator_of(engine: EngineClient, max_queue: int) -> Generator:
    return Generator(engine, tokenizer=None, metrics=ServerMetrics("m"), max_queue=max_queue)  # type: ignore[arg-type]


async def one(generator: Generator, count: int = 1) -> list[Choice]:
    with generator.admitted(count, 0) as admission:
        await asyncio.sleep(0)  # the prompt is tokenised in a thread
        return await generator.collect_all([([1], SamplingParams(max_tokens=1))] * count, admission)


def test_a_burst_fills_the_batch_and_the_queue_and_no_more() -> None:
    async def burst() -> list[object]:
        engine = StillEngine()
        generator = generator_of(engine, max_queue=3)
        tasks = [asyncio.create_task(one(generator)) for _ in range(10)]
        await asyncio.sleep(0.05)
        assert engine.in_flight == 5
        assert engine.reserved == 0
        engine.finish_all()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(burst())
    refused = [r for r in results if isinstance(r, Problem)]
    assert len(refused) == 5
    assert {(r.status, r.retry_after_s) for r in refused} == {(429, 2.0)}


def test_what_the_engine_reports_counts_once() -> None:
    async def later() -> int:
        engine = StillEngine()
        generator = generator_of(engine, max_queue=3)
        tasks = [asyncio.create_task(one(generator)) for _ in range(4)]
        await asyncio.sleep(0.05)
        engine.stats = EngineStats(max_num_seqs=2, running=2, waiting=2)
        assert engine.waiting_after(0) == 2
        tasks.append(asyncio.create_task(one(generator)))
        await asyncio.sleep(0.05)
        with pytest.raises(Problem, match="3 requests are already waiting"):
            await one(generator)
        engine.finish_all()
        return len(await asyncio.gather(*tasks))

    assert asyncio.run(later()) == 5


def test_an_idle_engine_takes_several_choices_of_one_request() -> None:
    async def several() -> int:
        engine = StillEngine()
        task = asyncio.create_task(one(generator_of(engine, max_queue=1), count=3))
        await asyncio.sleep(0.05)
        engine.finish_all()
        assert engine.reserved == 0
        return len(await task)

    assert asyncio.run(several()) == 3
