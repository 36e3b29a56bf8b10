"""Every operator, every backend that this machine can run, every case, against the float64 reference.

Buffers that a backend allocates start as NaN (or the largest integer), so an unwritten output shows.
Triton's interpreter takes minutes for what a GPU does in seconds: there the fast suite runs each case in one
of its types, by turns, and the slow suite in the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import quick_interpreter
import torch

from delivery.kernels import OPS
from delivery.kernels.op import Case, Op

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    quick_interpreter.install()
PLAIN = (torch.float32, torch.float16, torch.bfloat16)
# The interpreter truncates to bf16 and multiplies bf16 tiles wrongly: bf16 is judged on a GPU.
DTYPES = PLAIN if DEVICE.type == "cuda" else PLAIN[:2]


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
                return tensor.fill_(math.nan)
            tensor.view(torch.uint8).fill_(0x7F)  # NaN in float8_e4m3fn
            return tensor

        return allocate

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


def runs() -> Iterator[Any]:
    for op in OPS.values():
        for number, case in enumerate(op.cases()):
            for backend in op.backends:
                dtypes = [dtype for dtype in DTYPES if dtype in case.tolerance]
                turn = number.bit_count() % len(dtypes)  # in step with no other property of the cases
                for i, dtype in enumerate(dtypes):
                    name = f"{op.name}-{backend}-{case.name}-{str(dtype).removeprefix('torch.')}"
                    later = backend == "triton" and DEVICE.type == "cpu" and i != turn
                    yield pytest.param(
                        op, backend, case, dtype, id=name, marks=[pytest.mark.slow] if later else []
                    )


# numpy, under the interpreter, warns where a GPU quietly returns the infinity that is wanted.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(("op", "backend", "case", "dtype"), list(runs()))
def test_backend_agrees_with_float64(op: Op, backend: str, case: Case, dtype: torch.dtype) -> None:
    seed = int.from_bytes(f"{op.name}{case.name}".encode()) % 1000
    args = case.make(DEVICE, dtype, seed)
    if reason := op.backends[backend].why_not(*args):
        pytest.skip(reason)
    expected_args = [widened(a) for a in case.make(DEVICE, dtype, seed)]
    expected = op.reference(*expected_args)
    actual = op(*args, backend=backend)
    for got, want in zip(tensors(actual), tensors(expected), strict=True):
        assert got.shape == want.shape
        assert want.double().isfinite().all()
        assert relative_error(got, want) <= case.tolerance[dtype]
    for got, want in zip(tensors(args), tensors(expected_args), strict=True):
        # An operator may write to its arguments. Those of paged attention hold NaN where nobody may read.
        touched = ~(got.double().isnan() & want.double().isnan())
        assert relative_error(got[touched], want[touched]) <= case.tolerance[dtype]


@pytest.mark.parametrize("name", list(OPS))
def test_cases_are_fresh_and_named(name: str) -> None:
    cases = list(OPS[name].cases())
    assert len({case.name for case in cases}) == len(cases) > 0
    one, other = (tensors(cases[0].make(torch.device("cpu"), torch.float32, seed)) for seed in (1, 2))
    assert any(not torch.equal(a.double(), b.double()) for a, b in zip(one, other, strict=True))


def tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [v for v in values if isinstance(v, torch.Tensor)]


def widened(value: Any) -> Any:
    """float64 copies of floats; integers and fp8 (a storage layout, not an input precision) as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.double() if value.dtype in PLAIN else value.clone()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖; infinite where `got` is not finite."""
    a, b = got.double(), want.double()
    size = b.norm().item()
    error = (a - b).norm().item() / (size if size > 0 else 1.0)
    return error if math.isfinite(error) else math.inf
