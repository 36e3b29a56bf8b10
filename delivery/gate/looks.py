"""Looks (interim analyses): when a paired comparison may stop, and the error that each look may spend.

A comparison that is judged after 5, 8 and 12 pairs has three chances to be wrong. The one-sided error
of 5 % (a 90 % interval) is therefore spent over the looks in proportion to the pairs that each one
adds (Kim & DeMets 1987, power family with rho = 1), and the parts add up (Bonferroni), so no joint
distribution of the looks has to be assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

ERROR = 0.05
LOOKS = (5, 8, 12)
MIN_RUNS = 5


@dataclass(frozen=True, slots=True)
class Look:
    """One look: how many pairs it sees, the one-sided error it may spend, whether it is the last."""

    pairs: int
    error: float
    last: bool


ONLY = Look(pairs=0, error=ERROR, last=True)
"""The single look of a stored comparison, or of arrays handed over at once."""


def looks(plan: tuple[int, ...] = LOOKS) -> tuple[Look, ...]:
    """The looks of a plan of increasing pair counts. Raises ValueError for one that does not increase."""
    if not plan or plan[0] < 1 or any(b <= a for a, b in pairwise(plan)):
        raise ValueError(f"a plan of looks increases, got {plan}")
    before = (0, *plan[:-1])
    return tuple(
        Look(pairs=n, error=ERROR * (n - m) / plan[-1], last=n == plan[-1])
        for m, n in zip(before, plan, strict=True)
    )
