"""BLEU-4 (Papineni et al. 2002) of token sequences against one reference each, over the whole corpus."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_ORDER = 4


def bleu4(candidates: Sequence[Sequence[Any]], references: Sequence[Sequence[Any]]) -> float:
    """0 … 1; counts of an order without a match are smoothed to 1/2ᵏ (Chen & Cherry 2014, method 3).

    Raises ValueError when the numbers of sequences differ.
    """
    if len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} candidates for {len(references)} references")
    ours, theirs = sum(map(len, candidates)), sum(map(len, references))
    if ours == 0:
        return 0.0
    logs, halvings = 0.0, 0
    for size in range(1, _ORDER + 1):
        matched = total = 0
        for candidate, reference in zip(candidates, references, strict=True):
            have, want = _grams(candidate, size), _grams(reference, size)
            matched += sum((have & want).values())
            total += sum(have.values())
        if total == 0:
            return 0.0
        if matched == 0:
            halvings += 1
        logs += math.log((matched or 0.5**halvings) / total)
    brevity = 1.0 if ours > theirs else math.exp(1.0 - theirs / ours)
    return brevity * math.exp(logs / _ORDER)


def _grams(tokens: Sequence[Any], size: int) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1))
