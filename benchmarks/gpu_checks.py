"""Correctness on the card: every backend of an operator against its float64 reference, in many processes.

Most of the time goes into compiling, so the cases are spread over worker processes; what they compile lands
in Triton's cache on disk, where the timing process finds it.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

PLAIN = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: what was run, its relative error, and the largest one allowed."""

    name: str
    error: float
    allowed: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem and self.error <= self.allowed


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖; infinite where something is not finite."""
    a, b = got.double(), want.double()
    error = (a - b).norm().item() / max(b.norm().item(), 1e-30)
    return error if math.isfinite(error) else math.inf


def check_operators(names: Sequence[str], dtypes: Sequence[torch.dtype] = PLAIN[1:]) -> list[Check]:
    """Every case and backend of the operators `names`, in the dtypes that a GPU serves."""
    from delivery.kernels import OPS

    tasks = [
        (name, case.name, dtype)
        for name in names
        for case in OPS[name].cases()
        for dtype in dtypes
        if dtype in case.tolerance
    ]
    return [check for found in in_processes(_check_case, tasks) for check in found]


def in_processes(work: Callable[[Any], Any], tasks: Iterable[Any]) -> list[Any]:
    """work(task) for each task, in worker processes of their own, in order."""
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(work, tasks))


def _check_case(task: tuple[str, str, torch.dtype]) -> list[Check]:
    name, case_name, dtype = task
    label = f"{name} {case_name} {str(dtype).removeprefix('torch.')}"
    try:
        return list(_compared(name, case_name, dtype, label))
    except Exception as failure:  # one broken process must not lose what the others found
        return [Check(label, math.inf, 0.0, f"{type(failure).__name__}: {failure}"[:300])]


def _compared(name: str, case_name: str, dtype: torch.dtype, label: str) -> Iterator[Check]:
    from delivery.kernels import OPS

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    op = OPS[name]
    case = next(c for c in op.cases() if c.name == case_name)
    device = torch.device("cuda")
    seed = torch.seed() % (1 << 31)
    expected = op.reference(*[_widened(a) for a in case.make(device, dtype, seed)])
    for backend in op.backends:
        args = case.make(device, dtype, seed)
        if op.backends[backend].why_not(*args) is None:
            pairs = zip(_tensors(op(*args, backend=backend)), _tensors(expected), strict=True)
            error = max(relative_error(got, want) for got, want in pairs)
            yield Check(f"{label} {backend}", error, case.tolerance[dtype])


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.double() if value.dtype in PLAIN else value.clone()


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [v for v in values if isinstance(v, torch.Tensor)]
