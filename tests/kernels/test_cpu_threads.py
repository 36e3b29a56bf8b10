"""The threads of CPU programs: any number of them gives the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from delivery.kernels.cpu import layer
from delivery.kernels.cpu.pack import pack
from delivery.kernels.cpu.program import Crew
from delivery.kernels.linear_w4a16 import random_weight


@pytest.fixture
def crews(monkeypatch: pytest.MonkeyPatch) -> Iterator[Iterator[Crew]]:
    made: list[Crew] = []

    def one_after_the_other() -> Iterator[Crew]:
        for threads in (1, 2, 3):
            made.append(Crew(threads))
            monkeypatch.setattr(layer, "crew", lambda: made[-1])
            yield made[-1]

    yield one_after_the_other()
    for crew in made:
        crew.close()


@pytest.mark.parametrize("rows", [1, 5])
def test_any_number_of_threads_gives_the_same_numbers(rows: int, crews: Iterator[Crew]) -> None:
    weight = random_weight(300, 256, 64, zero_point=True, act_order=False, seed=5, scale=torch.float16)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(6))
    want = x.double() @ weight.dequantize(torch.float64).t()
    results = []
    for crew in crews:
        # Again and again: a helper that wakes late finds another program than it was woken for.
        results += [layer.linear(pack(weight), x) for _ in range(20 * crew.threads)]
    assert (results[0] - want).norm() < 1e-3 * want.norm()
    assert all(torch.equal(result, results[0]) for result in results)


def test_callers_in_several_threads_take_turns() -> None:
    packed = pack(torch.randn(512, 512, generator=torch.Generator().manual_seed(7)))
    inputs = torch.randn(2, 4, 512, generator=torch.Generator().manual_seed(8))
    want = [layer.linear(packed, x) for x in inputs]

    def differing(index: int) -> int:
        return sum(not torch.equal(layer.linear(packed, inputs[index]), want[index]) for _ in range(1500))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(differing, range(2))) == [0, 0]
