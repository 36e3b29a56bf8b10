"""A run of the whole engine, step by step: what each kind of step takes on the card, and on its host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from delivery.engine.core import EngineCore


@dataclass(frozen=True, slots=True)
class Step:
    """tokens of prompts, and of sequences that decode; host_ms: until it was submitted; start, end: events on
    the card around it."""

    prompt: int
    decodes: int
    host_ms: float
    start: torch.cuda.Event
    end: torch.cuda.Event

    @property
    def kind(self) -> str:
        """`prompts`, `mixed`, or `decodes` with their number in sixty-fours."""
        if not self.prompt:
            return f"{-(-self.decodes // 64) * 64:4} decodes"
        return "mixed" if self.decodes else "prompts"


@contextmanager
def recorded(engine: EngineCore) -> Iterator[list[Step]]:
    """The steps that `engine` runs between `with` and its end."""
    steps: list[Step] = []
    original: Callable[[Any], Any] = engine._executor.submit

    def submit(work: Any) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        decodes = sum(item.num_tokens == 1 for item in work.scheduled)
        began = time.perf_counter()
        start.record()
        pending = original(work)
        end.record()
        taken = (time.perf_counter() - began) * 1e3
        steps.append(Step(work.num_tokens - decodes, decodes, taken, start, end))
        return pending

    engine._executor.submit = submit  # type: ignore[method-assign]
    try:
        yield steps
        torch.cuda.synchronize()
    finally:
        del engine._executor.submit


def report(steps: list[Step]) -> None:
    """Print, by kind of step: how many, tokens, ms on the card, ms that the card stood still in front of one,
    ms of its host; means, and the median on the card."""
    print("   kind            steps  prompt  decodes  card ms  median  idle ms  host ms    total ms")
    idle = [0.0] + [max(0.0, a.end.elapsed_time(b.start)) for a, b in pairwise(steps)]
    for kind in sorted({step.kind for step in steps}):
        rows = [(step, gap) for step, gap in zip(steps, idle, strict=True) if step.kind == kind]
        card = [step.start.elapsed_time(step.end) for step, _ in rows]
        gaps = [gap for _, gap in rows]
        print(
            f"   {kind:14} {len(rows):6} {mean(s.prompt for s, _ in rows):7.0f} "
            f"{mean(s.decodes for s, _ in rows):8.0f} {mean(card):8.2f} {statistics.median(card):7.2f} "
            f"{mean(gaps):8.2f} {mean(s.host_ms for s, _ in rows):8.2f} {sum(card) + sum(gaps):11.1f}",
            flush=True,
        )


def mean(values: Any) -> float:
    return statistics.fmean(values)
