"""A perplexity that drifted from the last release's is shown with the limit that it broke."""

from __future__ import annotations

import pytest

from delivery.gate.report import Metric
from delivery.report import words
from delivery.report.quality import against


@pytest.mark.parametrize(
    ("limit", "status", "shown"),
    [(None, "shown", "≤ 22"), (30.0, "pass", "≤ 22"), (24.0, "fail", "≤ 24")],
)
def test_the_limit_that_was_broken_is_shown(limit: float | None, status: str, shown: str) -> None:
    now = Metric("legal_perplexity", 25.0, "ppl", "lower", limit=limit, status=status)
    (judged,), (finding,) = against([now], {"legal_perplexity": 20.0}, 1.1)
    assert judged.status == "fail"
    assert words.limit(judged) == f"{shown} ppl"
    assert "+25% against the last release's 20" in finding.text
