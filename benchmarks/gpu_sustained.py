"""Products of many rows as a long prefill runs them: for long enough to reach the power limit.

    python benchmarks/gpu_sustained.py int8 fp8 [--rows 8192] [--weights random as-dummy]

Every candidate runs for `--seconds`, first in one order, then in the opposite one; the time is that of the
second half of each run. Clock and power are those of the same span.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_card import Watch
from gpu_checks import in_processes
from gpu_linear import FAMILIES, SHAPES, describe

from delivery.engine.tune import narrowed
from delivery.errors import EnvironmentLacking
from delivery.kernels.tuning import Choice
from delivery.kernels.w8_layout import PackedW8

NAMES = {"bf16": "w16a16", "w4a16": "w4a16", "int8": "w8a8int8", "fp8": "w8a8fp8"}


def sustained_us(calls: Sequence[Callable[[], object]], seconds: float) -> tuple[float, Watch]:
    """µs of one call once the card has settled."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    launches = 4 * len(calls)
    with torch.cuda.graph(graph):
        for i in range(launches):
            calls[i % len(calls)]()
    for span in (seconds / 2, seconds / 2):
        with Watch() as card:
            began, replays = time.perf_counter(), 0
            while time.perf_counter() - began < span:
                graph.replay()
                graph.replay()
                torch.cuda.synchronize()
                replays += 2
            taken = time.perf_counter() - began
    return taken / replays / launches * 1e6, card


def weight_of(form: str, n: int, k: int, kind: str) -> Any:
    weight = FAMILIES[NAMES[form]].weight(n, k)
    if kind == "as-dummy":
        if isinstance(weight, PackedW8) and form == "fp8":
            weight.weight.copy_(
                torch.empty(n, k, device="cuda").uniform_(-1e-3, 1e-3).to(weight.weight.dtype)
            )
        elif isinstance(weight, PackedW8):
            weight.weight.zero_()
        elif isinstance(weight, torch.Tensor):
            weight.uniform_(-1e-3, 1e-3)
    return weight


def study(form: str, shape: str, rows: int, kind: str, seconds: float) -> list[tuple[float, Choice, str]]:
    """(µs, candidate, what the card did), the fastest first."""
    family, (n, k) = FAMILIES[NAMES[form]], SHAPES[shape]
    weights = [weight_of(form, n, k, kind) for _ in range(2)]
    x = family.activations(rows, k)
    seen: dict[int, list[tuple[float, Watch]]] = {}
    listed = narrowed(family.candidates(n, k, rows))
    for order in (range(len(listed)), reversed(range(len(listed)))):
        for i in order:
            calls = [lambda w=w, c=listed[i]: family.run(x, w, c) for w in weights]
            try:
                seen.setdefault(i, []).append(sustained_us(calls, seconds))
            except (RuntimeError, EnvironmentLacking):
                continue
    return sorted(
        ((statistics.mean(us for us, _ in runs), listed[i], str(runs[-1][1])) for i, runs in seen.items()),
        key=lambda row: row[0],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("forms", nargs="*", default=["int8", "fp8"])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--shapes", default="qkv,o,gate_up,down")
    parser.add_argument("--weights", nargs="*", default=["random"])
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--show", type=int, default=4)
    options = parser.parse_args()
    tasks = [
        (form, shape, options.rows, choice)
        for form in options.forms
        for shape in options.shapes.split(",")
        for choice in narrowed(FAMILIES[NAMES[form]].candidates(*SHAPES[shape], options.rows))
    ]
    distinct = {(form, choice.tile): (form, shape, rows, choice) for form, shape, rows, choice in tasks}
    in_processes(_compile, list(distinct.values()))
    for form in options.forms:
        for kind in options.weights:
            for shape in options.shapes.split(","):
                n, k = SHAPES[shape]
                for us, choice, card in study(form, shape, options.rows, kind, options.seconds)[
                    : options.show
                ]:
                    rate = 2e-6 * n * k * options.rows / us
                    print(
                        f"{form} {kind:8} {shape:8}{us:8.1f} us {rate:6.0f} T/s g{_group(choice)} "
                        f"{describe(choice):32} {card}",
                        flush=True,
                    )


def _group(choice: Choice) -> int:
    return 0 if choice.tile is None else choice.tile.group_m


def _compile(task: tuple[str, str, int, Choice]) -> None:
    form, shape, rows, choice = task
    family, (n, k) = FAMILIES[NAMES[form]], SHAPES[shape]
    try:
        family.run(family.activations(rows, k), family.weight(n, k), choice)
        torch.cuda.synchronize()
    except (RuntimeError, EnvironmentLacking):
        return


if __name__ == "__main__":
    main()
