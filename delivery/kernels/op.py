"""Op: one operator with its truth, its backends and its test cases.

The reference is plain PyTorch, correct for any float dtype up to float64, written to be read. A
backend computes the same function faster; `why_not` says in a sentence why it cannot run a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from delivery.errors import EnvironmentLacking, UsageError, did_you_mean

WhyNot = Callable[..., str | None]


def _always(*_args: Any, **_kwargs: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation. `run` has the reference's signature; `why_not` takes the same arguments."""

    run: Callable[..., Any]
    why_not: WhyNot = _always


@dataclass(frozen=True, slots=True)
class Case:
    """Named inputs of an operator.

    `make(device, dtype, seed)` returns fresh random positional arguments; `tolerance` maps a dtype
    to the largest allowed relative error ‖out − ref‖ / ‖ref‖ against the float64 reference.
    """

    name: str
    make: Callable[[torch.device, torch.dtype, int], tuple[Any, ...]]
    tolerance: Mapping[torch.dtype, float]


@dataclass(frozen=True, slots=True)
class Op:
    """An operator: calling it dispatches to a backend.

    backend="auto" takes the first backend (in declaration order, or in the order that a tuning
    table prefers) whose `why_not` is None; a named backend runs or raises, it never falls back.
    """

    name: str
    reference: Callable[..., Any]
    backends: Mapping[str, Backend]
    cases: Callable[[], Iterator[Case]]
    preferred: Callable[..., str | None] = field(default=_always)

    def __call__(self, *args: Any, backend: str = "auto", **kwargs: Any) -> Any:
        return self.select(*args, backend=backend, **kwargs).run(*args, **kwargs)

    def select(self, *args: Any, backend: str = "auto", **kwargs: Any) -> Backend:
        """The backend that would run this call."""
        if backend != "auto":
            if backend not in self.backends:
                raise UsageError(
                    "unknown-backend",
                    f"operator {self.name} has no backend {backend!r}",
                    hint=did_you_mean(backend, self.backends),
                )
            if reason := self.backends[backend].why_not(*args, **kwargs):
                raise EnvironmentLacking(
                    "backend-unavailable",
                    f"operator {self.name}: backend {backend!r} cannot run this call",
                    why=reason,
                    hint="use backend='auto'",
                )
            return self.backends[backend]
        wanted = self.preferred(*args, **kwargs)
        order = [wanted] if wanted is not None and wanted in self.backends else []
        order += self.backends
        reasons = {}
        for name in order:
            reason = self.backends[name].why_not(*args, **kwargs)
            if reason is None:
                return self.backends[name]
            reasons[name] = reason
        raise EnvironmentLacking(
            "backend-unavailable",
            f"no backend of operator {self.name} can run this call",
            why="; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
        )
