"""Where a step's time goes on the card: one layer, kernel by kernel, averaged over a model's layers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as record

from delivery.engine import core
from delivery.engine.request import Request, SamplingParams

_MARK = "rope"
"""In the name of a kernel that runs once a layer."""


def prefill_profile(engine: core.EngineCore, prompts: int = 8, tokens: int = 1024) -> None:
    """One layer of a step of whole prompts, random tokens."""
    _submit(engine, prompts, tokens, 1)
    _drain(engine)
    _submit(engine, prompts, tokens, 1)
    with record(activities=[ProfilerActivity.CUDA]) as seen:
        _drain(engine)
        torch.cuda.synchronize()
    print(f"one layer of a step of {prompts * tokens} tokens:")
    _print_layer(_kernels(seen))


def decode_profile(engine: core.EngineCore, batch: int, tokens: int = 1024, steps: int = 6) -> None:
    """One layer of a decode step, and what stands between two steps. With overlapped launches a kernel waits
    inside for the one in front, so starts count, not durations."""
    _submit(engine, batch, tokens, steps + 24)
    while engine.has_unfinished() and engine.scheduler.requests and not _all_decode(engine):
        engine.step()
    for _ in range(4):
        engine.step()
    with record(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    for request_id in list(engine.scheduler.requests):
        engine.abort(request_id)
    _drain(engine)
    print(f"one layer of a decode step at batch {batch}:")
    _print_layer(_kernels(seen))


def _all_decode(engine: core.EngineCore) -> bool:
    return not engine.scheduler.waiting and all(
        len(request.output_token_ids) > 1 for request in engine.scheduler.requests.values()
    )


def _submit(engine: core.EngineCore, prompts: int, tokens: int, new_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    for index in range(prompts):
        ids = torch.randint(0, engine.config.vocab_size, (tokens,)).tolist()
        engine.add_request(Request(f"profile-{index}", ids, sampling))


def _drain(engine: core.EngineCore) -> None:
    while engine.has_unfinished():
        engine.step()


def _kernels(seen: Any) -> list[tuple[float, float, str]]:
    """(start, end, name) of what ran on the card, in order, µs."""
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted((e.time_range.start, e.time_range.end, e.name) for e in events)


def _print_layer(kernels: Sequence[tuple[float, float, str]]) -> None:
    """Means by position between two marks, over spans of the commonest length; then the whole."""
    marks = [i for i, (_, _, name) in enumerate(kernels) if _MARK in name]
    spans = list(pairwise(marks))
    lengths = [last - first for first, last in spans]
    if not lengths:
        print("   no layers seen")
        return
    usual = statistics.mode(lengths)
    layers = [kernels[first:last] for first, last in spans if last - first == usual]
    following = [kernels[last][0] - kernels[first][0] for first, last in spans if last - first == usual]
    for position in range(usual):
        column = [layer[position] for layer in layers]
        taken = statistics.median(end - start for start, end, _ in column)
        at = statistics.median(layer[position][0] - layer[0][0] for layer in layers)
        print(f"{at:9.1f} {taken:9.1f}  {column[0][2][:90]}")
    whole = kernels[-1][1] - kernels[0][0]
    busy = sum(end - start for start, end, _ in kernels)
    print(
        f"   layer {statistics.median(following):.1f} us ({len(layers)} seen), from first to last kernel "
        f"{whole / 1e3:.2f} ms, sum of durations {busy / 1e3:.2f} ms"
    )
    between = [span for span in spans if span[1] - span[0] != usual]
    for first, last in between[:1]:
        begin = kernels[first][0]
        print("   between two steps:")
        for start, end, name in kernels[first : min(last, first + 40)]:
            print(f"{start - begin:9.1f} {end - start:9.1f}  {name[:90]}")
